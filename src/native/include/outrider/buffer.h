#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace outrider {

// Memory for weights and scratch: 64-byte aligned, zeroed, on huge pages where the system has them (a stream over
// 4 KiB pages loses a third of the bandwidth to page walks). Movable; freed or unmapped with its last owner.
class Buffer {
 public:
  Buffer() = default;
  // Throws std::bad_alloc if the memory is not to be had.
  explicit Buffer(size_t bytes);

  // A read-only, shared view of a whole file; throws std::runtime_error naming the path.
  static Buffer map_file(const std::string& path);

  uint8_t* data() { return data_.get(); }
  const uint8_t* data() const { return data_.get(); }
  size_t size() const { return size_; }

  // Shared ownership of the memory, for views that outlive this object.
  std::shared_ptr<const uint8_t> share() const { return data_; }

 private:
  Buffer(std::shared_ptr<uint8_t> data, size_t size) : data_(std::move(data)), size_(size) {}

  std::shared_ptr<uint8_t> data_;
  size_t size_ = 0;
};

}  // namespace outrider
