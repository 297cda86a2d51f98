// Errors that a caller can provoke and mend; bindings give each its Python twin. Wrong arguments are
// std::invalid_argument; a broken invariant is std::logic_error.
#pragma once

#include <stdexcept>

namespace outrider {

// No free KV pages are left for the rows of a forward pass; nothing was changed.
class KvCacheFull : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A row would lie beyond the longest sequence that the cache was made for; nothing was changed.
class ContextTooLong : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace outrider
