#include "outrider/buffer.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

namespace outrider {
namespace {

constexpr size_t huge_page = size_t{2} << 20;

std::shared_ptr<uint8_t> allocate_small(size_t bytes) {
  const size_t rounded = (bytes + 63) / 64 * 64;
  auto* memory = static_cast<uint8_t*>(std::aligned_alloc(64, rounded));
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory, 0, rounded);
  return {memory, [](uint8_t* p) { std::free(p); }};
}

// Straight from the system, which clears a page when it is first touched: a KV cache takes no memory before it is used.
std::shared_ptr<uint8_t> allocate_large(size_t bytes) {
  const size_t size = bytes + huge_page;  // room to start at a multiple of a huge page
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  auto* aligned = reinterpret_cast<uint8_t*>((address + huge_page - 1) / huge_page * huge_page);
#if defined(MADV_HUGEPAGE)
  madvise(aligned, bytes, MADV_HUGEPAGE);
#endif
  return {aligned, [memory, size](uint8_t*) { munmap(memory, size); }};
}

}  // namespace

Buffer::Buffer(size_t bytes) : size_(bytes) {
  // Small buffers would waste most of a huge page.
  if (bytes > 0) data_ = bytes >= huge_page ? allocate_large(bytes) : allocate_small(bytes);
}

Buffer Buffer::map_file(const std::string& path) {
  const auto fail = [&](const char* what) -> std::runtime_error {
    return std::runtime_error("cannot " + std::string(what) + " " + path + ": " + std::strerror(errno));
  };
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) throw fail("open");
  struct stat status{};
  if (fstat(descriptor, &status) != 0) {
    const auto error = fail("stat");
    close(descriptor);
    throw error;
  }
  const auto size = static_cast<size_t>(status.st_size);
  if (size == 0) {
    close(descriptor);
    return {};
  }
  void* memory = mmap(nullptr, size, PROT_READ, MAP_SHARED, descriptor, 0);
  const auto error = fail("map");
  close(descriptor);
  if (memory == MAP_FAILED) throw error;
  return {std::shared_ptr<uint8_t>(static_cast<uint8_t*>(memory), [size](uint8_t* p) { munmap(p, size); }), size};
}

}  // namespace outrider
