#include "outrider/buffer.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>

namespace outrider {
namespace {

constexpr size_t huge_page = size_t{2} << 20;

std::shared_ptr<uint8_t> allocate(size_t bytes) {
  // Small buffers would waste most of a huge page.
  const size_t alignment = bytes >= huge_page ? huge_page : 64;
  const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  auto* memory = static_cast<uint8_t*>(std::aligned_alloc(alignment, rounded));
  if (memory == nullptr) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  if (alignment == huge_page) madvise(memory, rounded, MADV_HUGEPAGE);
#endif
  std::memset(memory, 0, rounded);
  return {memory, [](uint8_t* p) { std::free(p); }};
}

}  // namespace

Buffer::Buffer(size_t bytes) : size_(bytes) {
  if (bytes > 0) data_ = allocate(bytes);
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
