#pragma once

#include <string_view>

namespace outrider {

// Instruction sets a kernel may be written for, lowest first. `avx2` implies FMA and F16C; `avx512` implies
// F, BW, DQ, VL and VNNI; `amx` implies `avx512` plus the int8 and bf16 tiles.
enum class Isa { portable, avx2, avx512, amx };

struct CpuFeatures {
  bool avx2 = false;
  bool avx512 = false;
  bool avx512_bf16 = false;
  bool amx = false;
};

// What this processor and operating system offer, from cpuid and xgetbv (AMX also asks the kernel for permission).
const CpuFeatures& cpu_features();

// The instruction set used unless OUTRIDER_ISA says otherwise: the highest one available.
// Throws std::invalid_argument if OUTRIDER_ISA is unknown or names a set this machine lacks.
Isa default_isa();

bool isa_available(Isa isa);
std::string_view isa_name(Isa isa);
// Inverse of isa_name; throws std::invalid_argument listing the choices.
Isa parse_isa(std::string_view name);

}  // namespace outrider
