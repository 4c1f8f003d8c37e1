// What aclnn operators are called with: tensors, scalars and lists, and the two calls every operator is made of.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

using Status = int;
constexpr Status kOk = 0, kInvalid = 161002;

enum Dtype { kFp32 = 0, kFp16 = 1, kInt8 = 2, kInt32 = 3, kUint8 = 4, kInt64 = 9, kFp64 = 11, kBool = 12, kBf16 = 27 };

inline Status refuse(const char* operator_name, const char* why) {
    fprintf(stderr, "EMULATED %s: %s\n", operator_name, why);
    return kInvalid;
}

// Sizes and strides count elements; `offset` is the first element's.
struct Tensor {
    std::vector<int64_t> sizes, strides;
    int64_t offset;
    int dtype;
    char* data;

    int64_t count() const {
        int64_t product = 1;
        for (int64_t size : sizes) product *= size;
        return product;
    }
    int64_t size(int from_end) const { return sizes[sizes.size() - from_end]; }

    // Place of the element that is number `index` in row-major order.
    int64_t place(int64_t index) const {
        int64_t found = offset;
        for (int dim = int(sizes.size()) - 1; dim >= 0; dim--) {
            found += index % sizes[dim] * strides[dim];
            index /= sizes[dim];
        }
        return found;
    }
    float get(int64_t place) const;
    void set(int64_t place, float value) const;

    std::vector<float> read() const {  // row-major
        std::vector<float> values(count());
        for (size_t i = 0; i < values.size(); i++) values[i] = get(place(i));
        return values;
    }
    void write(const std::vector<float>& values) const {
        for (size_t i = 0; i < values.size(); i++) set(place(i), values[i]);
    }
};

inline float Tensor::get(int64_t at) const {
    switch (dtype) {
        case kFp32: return reinterpret_cast<float*>(data)[at];
        case kFp64: return float(reinterpret_cast<double*>(data)[at]);
        case kFp16: return float(reinterpret_cast<_Float16*>(data)[at]);
        case kBf16: {
            const uint32_t bits = uint32_t(reinterpret_cast<uint16_t*>(data)[at]) << 16;
            float value;
            return memcpy(&value, &bits, 4), value;
        }
        case kInt32: return float(reinterpret_cast<int32_t*>(data)[at]);
        case kInt64: return float(reinterpret_cast<int64_t*>(data)[at]);
        default: return float(reinterpret_cast<uint8_t*>(data)[at]);
    }
}

inline void Tensor::set(int64_t at, float value) const {
    switch (dtype) {
        case kFp32: reinterpret_cast<float*>(data)[at] = value; break;
        case kFp64: reinterpret_cast<double*>(data)[at] = value; break;
        case kFp16: reinterpret_cast<_Float16*>(data)[at] = _Float16(value); break;
        case kBf16: {
            uint32_t bits;
            memcpy(&bits, &value, 4);
            const bool is_nan = value != value;
            reinterpret_cast<uint16_t*>(data)[at] = is_nan ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
            break;
        }
        case kInt32: reinterpret_cast<int32_t*>(data)[at] = int32_t(value); break;
        case kInt64: reinterpret_cast<int64_t*>(data)[at] = int64_t(value); break;
        default: data[at] = char(value);
    }
}

struct IntArray {
    std::vector<int64_t> values;
};

// The first call plans (and checks), the second executes what was planned.
using Plan = std::function<void()>;

inline Status planned(Plan plan, uint64_t* workspace, void** executor) {
    *workspace = 0;
    *executor = new Plan(std::move(plan));
    return kOk;
}

#define EXECUTES(name)                                                \
    API Status name(void*, uint64_t, void* executor, void*) {         \
        Plan* plan = static_cast<Plan*>(executor);                    \
        (*plan)();                                                    \
        delete plan;                                                  \
        return kOk;                                                   \
    }
