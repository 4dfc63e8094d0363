// Included before every source of a release wheel (OCTAVO_RELEASE), so that it also loads beside the libstdc++ of GCC 11, RHEL 9's.
// GCC 12 gave condition_variable::wait a second version, GLIBCXX_3.4.30, that differs from the first by noexcept alone.
#pragma once

__asm__(
    ".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE,"
    "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
