// The inner loops that gain from wide vectors, compiled once per CPU level; every level gives the same bits.
#pragma once

namespace clickfleet {

const char* cpu_level();  // "avx512", or "base": x86-64-v3, or plain C++ on other CPUs

}  // namespace clickfleet
