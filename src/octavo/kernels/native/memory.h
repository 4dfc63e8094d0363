// Scratch memory that a thread keeps between calls. Fresh pages cost more than writing them does: the kernel zeroes each, a
// fault for every 4 KiB.
#pragma once

#include <cstdint>

namespace octavo {

class Scratch {
public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch();

    // Room for so many numbers, 64 bytes aligned. Throws std::bad_alloc, before anything was changed.
    float* floats(int64_t count);

    // Gives back what is more than a thread should hold on to.
    void trim();

private:
    float* data_ = nullptr;
    int64_t size_ = 0;
};

}  // namespace octavo
