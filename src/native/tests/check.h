// The little that a plain executable of tests needs.
#pragma once

#include <cstdio>
#include <string>

namespace outrider::test {

inline int failures = 0;

inline void check(bool ok, const std::string& what, const char* file, int line) {
  if (ok) return;
  ++failures;
  std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, what.c_str());
}

// Whether fn throws a Error.
template <typename Error, typename F>
bool throws(F&& fn) {
  try {
    fn();
  } catch (const Error&) {
    return true;
  } catch (...) {
  }
  return false;
}

inline int report() {
  if (failures > 0) std::fprintf(stderr, "%d checks failed\n", failures);
  return failures > 0 ? 1 : 0;
}

}  // namespace outrider::test

#define CHECK(condition) ::outrider::test::check((condition), #condition, __FILE__, __LINE__)
#define CHECK_THAT(condition, what) ::outrider::test::check((condition), (what), __FILE__, __LINE__)
