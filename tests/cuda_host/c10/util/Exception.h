// Stands in for torch's header of this name.
#pragma once

#include <exception>
#include <string>
#include <utility>

namespace c10 {

class Error : public std::exception {
 public:
  explicit Error(std::string message) : message_(std::move(message)), with_backtrace_(message_ + "\nframe #0") {}
  const char* what() const noexcept override { return with_backtrace_.c_str(); }
  const char* what_without_backtrace() const noexcept { return message_.c_str(); }

 private:
  std::string message_, with_backtrace_;
};

}  // namespace c10
