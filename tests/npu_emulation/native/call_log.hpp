// EMULATED_NPU_LOG=PREFIX: every fused operator and collective is a line of PREFIX.<process>.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

// This process's file, or null where nobody asked for one. Each library that writes opens it to append.
inline FILE* call_log() {
    static FILE* file = [] {
        const char* prefix = getenv("EMULATED_NPU_LOG");
        return prefix ? fopen((std::string(prefix) + "." + std::to_string(getpid())).c_str(), "a") : nullptr;
    }();
    return file;
}
