#include "outrider/cpu.h"

#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace outrider {
namespace {

#if defined(__x86_64__)

struct Registers {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r;
  if (__get_cpuid_max(0, nullptr) >= leaf) __cpuid_count(leaf, subleaf, r.eax, r.ebx, r.ecx, r.edx);
  return r;
}

constexpr bool bit(uint32_t word, int index) { return (word >> index) & 1u; }

uint64_t enabled_state() {
  uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

// Linux hands out the 8 KiB of tile state only to processes that ask for it.
bool request_tile_permission() {
#if defined(__linux__)
  constexpr long request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

CpuFeatures detect() {
  CpuFeatures features;
  const Registers base = cpuid(1, 0);
  if (!bit(base.ecx, 27)) return features;  // OSXSAVE: without it the wide registers are not saved
  const uint64_t state = enabled_state();
  const bool ymm = (state & 0x6) == 0x6, zmm = (state & 0xe6) == 0xe6, tiles = (state & 0x60000) == 0x60000;
  const Registers leaf7 = cpuid(7, 0), leaf7_1 = cpuid(7, 1);
  const bool fma = bit(base.ecx, 12), f16c = bit(base.ecx, 29);
  features.avx2 = ymm && fma && f16c && bit(leaf7.ebx, 5);
  features.avx512 = features.avx2 && zmm && bit(leaf7.ebx, 16) && bit(leaf7.ebx, 17) && bit(leaf7.ebx, 30) &&
                    bit(leaf7.ebx, 31) && bit(leaf7.ecx, 11);
  features.avx512_bf16 = features.avx512 && bit(leaf7_1.eax, 5);
  features.amx = features.avx512 && tiles && bit(leaf7.edx, 22) && bit(leaf7.edx, 24) && bit(leaf7.edx, 25) &&
                 request_tile_permission();
  return features;
}

#else

CpuFeatures detect() { return {}; }

#endif

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

Isa choose_isa(const char* forced) {
  if (forced != nullptr && *forced != '\0') {
    const Isa isa = parse_isa(forced);
    if (!isa_available(isa)) {
      throw std::invalid_argument("OUTRIDER_ISA=" + std::string(forced) +
                                  ": this machine lacks it; unset it or name a lower one");
    }
    return isa;
  }
  for (const Isa isa : {Isa::amx, Isa::avx512, Isa::avx2}) {
    if (isa_available(isa)) return isa;
  }
  return Isa::portable;
}

Isa default_isa() {
  static const Isa isa = choose_isa(std::getenv("OUTRIDER_ISA"));
  return isa;
}

bool isa_available(Isa isa) {
  switch (isa) {
    case Isa::portable:
      return true;
    case Isa::avx2:
      return cpu_features().avx2;
    case Isa::avx512:
      return cpu_features().avx512;
    case Isa::amx:
      return cpu_features().amx;
  }
  return false;
}

std::string_view isa_name(Isa isa) {
  switch (isa) {
    case Isa::portable:
      return "portable";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
    case Isa::amx:
      return "amx";
  }
  return "unknown";
}

Isa parse_isa(std::string_view name) {
  for (const Isa isa : {Isa::portable, Isa::avx2, Isa::avx512, Isa::amx}) {
    if (name == isa_name(isa)) return isa;
  }
  throw std::invalid_argument("unknown instruction set '" + std::string(name) +
                              "': choose portable, avx2, avx512 or amx");
}

}  // namespace outrider
