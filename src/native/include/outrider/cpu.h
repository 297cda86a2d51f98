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

// The set named by `forced`, or the highest one available if that is null or empty.
// Throws std::invalid_argument if the name is unknown or this machine lacks the set.
Isa choose_isa(const char* forced);

// choose_isa of the environment variable OUTRIDER_ISA, read once.
Isa default_isa();

bool isa_available(Isa isa);
std::string_view isa_name(Isa isa);
// Inverse of isa_name; throws std::invalid_argument listing the choices.
Isa parse_isa(std::string_view name);

}  // namespace outrider
