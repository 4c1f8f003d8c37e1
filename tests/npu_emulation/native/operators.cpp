// The rest of libopapi: how operators' arguments are made, and the operators that torch_npu calls beside attention.
// (Ordinary aten operators never get here: emulated_npu.py computes them.)

#include <cmath>

#include "objects.hpp"

// -- arguments ---------------------------------------------------------------------------------------------------

struct Scalar {
    float value;
};

API Tensor* aclCreateTensor(const int64_t* sizes, uint64_t dims, int dtype, const int64_t* strides, int64_t offset, int,
                            const int64_t*, uint64_t, void* data) {
    return new Tensor{{sizes, sizes + dims}, {strides, strides + dims}, offset, dtype, static_cast<char*>(data)};
}
API Scalar* aclCreateScalar(void* value, int dtype) {
    const Tensor one{{1}, {1}, 0, dtype, static_cast<char*>(value)};
    return new Scalar{one.get(0)};
}
API IntArray* aclCreateIntArray(const int64_t* values, uint64_t count) { return new IntArray{{values, values + count}}; }
API void* aclCreateFloatArray(const float*, uint64_t) { return new char; }
API void* aclCreateBoolArray(const bool*, uint64_t) { return new char; }
API void* aclCreateScalarList(void* const*, uint64_t) { return new char; }
API std::vector<Tensor*>* aclCreateTensorList(Tensor* const* tensors, uint64_t count) {
    return new std::vector<Tensor*>(tensors, tensors + count);
}

API Status aclDestroyTensor(const Tensor* one) { return delete one, kOk; }
API Status aclDestroyScalar(const Scalar* one) { return delete one, kOk; }
API Status aclDestroyIntArray(const IntArray* one) { return delete one, kOk; }
API Status aclDestroyFloatArray(const char* one) { return delete one, kOk; }
API Status aclDestroyBoolArray(const char* one) { return delete one, kOk; }
API Status aclDestroyScalarList(const char* one) { return delete one, kOk; }
API Status aclDestroyTensorList(const std::vector<Tensor*>* list) {
    for (Tensor* one : *list) delete one;
    return delete list, kOk;
}

// -- filling, casting, padding -------------------------------------------------------------------------------------

API Status aclnnInplaceZeroGetWorkspaceSize(Tensor* x, uint64_t* workspace, void** executor) {
    return planned([t = *x] { t.write(std::vector<float>(t.count())); }, workspace, executor);
}
EXECUTES(aclnnInplaceZero)

API Status aclnnInplaceFillScalarGetWorkspaceSize(Tensor* x, Scalar* value, uint64_t* workspace, void** executor) {
    return planned([t = *x, v = value->value] { t.write(std::vector<float>(t.count(), v)); }, workspace, executor);
}
EXECUTES(aclnnInplaceFillScalar)

// Copies and casts go through fp32, exact for what tests hold.
API Status aclnnInplaceCopyGetWorkspaceSize(Tensor* into, Tensor* from, uint64_t* workspace, void** executor) {
    return planned([a = *into, b = *from] { a.write(b.read()); }, workspace, executor);
}
EXECUTES(aclnnInplaceCopy)

API Status aclnnCastGetWorkspaceSize(Tensor* from, int, Tensor* into, uint64_t* workspace, void** executor) {
    return aclnnInplaceCopyGetWorkspaceSize(into, from, workspace, executor);
}
EXECUTES(aclnnCast)

// `padding`: before and after, the last dimension first.
API Status aclnnConstantPadNdGetWorkspaceSize(Tensor* x, IntArray* padding, Scalar* value, Tensor* y, uint64_t* workspace,
                                              void** executor) {
    auto plan = [a = *x, b = *y, pads = padding->values, v = value ? value->value : 0.f] {
        b.write(std::vector<float>(b.count(), v));
        const int dims = int(a.sizes.size());
        for (int64_t i = 0; i < a.count(); i++) {
            int64_t rest = i, place = b.offset;
            for (int dim = dims - 1; dim >= 0; dim--) {
                const size_t pad = size_t(dims - 1 - dim) * 2;
                place += (rest % a.sizes[dim] + (pad < pads.size() ? pads[pad] : 0)) * b.strides[dim];
                rest /= a.sizes[dim];
            }
            b.set(place, a.get(a.place(i)));
        }
    };
    return planned(plan, workspace, executor);
}
EXECUTES(aclnnConstantPadNd)

// -- RMSNorm: y = x r w with r = 1 / sqrt(mean(x^2) + epsilon) --------------------------------------------------------

API Status aclnnRmsNormGetWorkspaceSize(Tensor* x, Tensor* weight, double epsilon, Tensor* y, Tensor* inverse,
                                        uint64_t* workspace, void** executor) {
    auto plan = [a = *x, w = *weight, epsilon, out = *y, inv = *inverse] {
        const auto values = a.read(), scale = w.read();
        const int64_t width = w.count(), rows = a.count() / width;
        std::vector<float> result(values.size()), roots(rows);
        for (int64_t row = 0; row < rows; row++) {
            const float* from = &values[row * width];
            double square = 0;
            for (int64_t i = 0; i < width; i++) square += double(from[i]) * from[i];
            roots[row] = float(1 / std::sqrt(square / width + epsilon));
            for (int64_t i = 0; i < width; i++) result[row * width + i] = from[i] * roots[row] * scale[i];
        }
        out.write(result), inv.write(roots);
    };
    return planned(plan, workspace, executor);
}
EXECUTES(aclnnRmsNorm)

API Status aclnnRmsNormGradGetWorkspaceSize(Tensor* grad, Tensor* x, Tensor* inverse, Tensor* weight, Tensor* dx,
                                            Tensor* dweight, uint64_t* workspace, void** executor) {
    auto plan = [g = *grad, a = *x, inv = *inverse, w = *weight, to_x = *dx, to_w = *dweight] {
        const auto grads = g.read(), values = a.read(), roots = inv.read(), scale = w.read();
        const int64_t width = w.count(), rows = a.count() / width;
        std::vector<float> result(values.size()), sums(width);
        for (int64_t row = 0; row < rows; row++) {
            const float *from = &values[row * width], *given = &grads[row * width], root = roots[row];
            double projection = 0;
            for (int64_t i = 0; i < width; i++) {
                projection += double(given[i]) * scale[i] * from[i] * root;
                sums[i] += given[i] * from[i] * root;
            }
            for (int64_t i = 0; i < width; i++)
                result[row * width + i] = root * (given[i] * scale[i] - from[i] * root * float(projection / width));
        }
        to_x.write(result), to_w.write(sums);
    };
    return planned(plan, workspace, executor);
}
EXECUTES(aclnnRmsNormGrad)

// -- SwiGLU over the last dimension: silu(a) b for x = [a, b] --------------------------------------------------------

namespace {
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
}  // namespace

API Status aclnnSwiGluGetWorkspaceSize(Tensor* x, int64_t, Tensor* y, uint64_t* workspace, void** executor) {
    auto plan = [in = *x, out = *y] {
        const auto values = in.read();
        const int64_t width = in.size(1) / 2;
        std::vector<float> result(values.size() / 2);
        for (size_t i = 0; i < result.size(); i++) {
            const float* a = &values[i / width * 2 * width + i % width];
            result[i] = float(a[0] * sigmoid(a[0]) * a[width]);
        }
        out.write(result);
    };
    return planned(plan, workspace, executor);
}
EXECUTES(aclnnSwiGlu)

API Status aclnnSwiGluGradGetWorkspaceSize(Tensor* grad, Tensor* x, int64_t, Tensor* dx, uint64_t* workspace, void** executor) {
    auto plan = [g = *grad, in = *x, out = *dx] {
        const auto grads = g.read(), values = in.read();
        const int64_t width = in.size(1) / 2;
        std::vector<float> result(values.size());
        for (size_t i = 0; i < grads.size(); i++) {
            const size_t place = i / width * 2 * width + i % width;
            const double a = values[place], b = values[place + width], s = sigmoid(a);
            result[place] = float(grads[i] * b * (s + a * s * (1 - s)));
            result[place + width] = float(grads[i] * a * s);
        }
        out.write(result);
    };
    return planned(plan, workspace, executor);
}
EXECUTES(aclnnSwiGluGrad)

// -- rotary embedding, first half with second half: y = x cos + rotated(x) sin -----------------------------------------

namespace {

// Place of element `index` of `shape` in a tensor that may have size 1 where `shape` has more.
int64_t broadcast_place(const Tensor& t, const Tensor& shape, int64_t index) {
    int64_t place = t.offset;
    for (int dim = int(shape.sizes.size()) - 1; dim >= 0; dim--) {
        place += t.sizes[dim] == 1 ? 0 : index % shape.sizes[dim] * t.strides[dim];
        index /= shape.sizes[dim];
    }
    return place;
}

void rotate(const Tensor& x, const Tensor& cosine, const Tensor& sine, const Tensor& y, bool backwards) {
    const auto values = x.read();
    const int64_t width = x.size(1), half = width / 2;
    std::vector<float> result(values.size());
    for (int64_t i = 0; i < int64_t(values.size()); i++) {
        const bool first = i % width < half;
        const int64_t partner = first ? i + half : i - half;
        const float c = cosine.get(broadcast_place(cosine, x, i));
        // Forwards a number takes its partner's times its own sine; backwards, times the partner's.
        const float s = sine.get(broadcast_place(sine, x, backwards ? partner : i));
        result[i] = values[i] * c + (first != backwards ? -1 : 1) * values[partner] * s;
    }
    y.write(result);
}

}  // namespace

API Status aclnnRotaryPositionEmbeddingGetWorkspaceSize(Tensor* x, Tensor* cosine, Tensor* sine, int64_t mode, Tensor* y,
                                                        uint64_t* workspace, void** executor) {
    if (mode != 0) return refuse("RotaryPositionEmbedding", "only the mode that rotates halves is emulated");
    return planned([a = *x, c = *cosine, s = *sine, b = *y] { rotate(a, c, s, b, false); }, workspace, executor);
}
EXECUTES(aclnnRotaryPositionEmbedding)

API Status aclnnRotaryPositionEmbeddingGradGetWorkspaceSize(Tensor* grad, Tensor* cosine, Tensor* sine, Tensor*, int64_t mode,
                                                            Tensor* dx, Tensor*, Tensor*, uint64_t* workspace, void** executor) {
    if (mode != 0) return refuse("RotaryPositionEmbeddingGrad", "only the mode that rotates halves is emulated");
    return planned([g = *grad, c = *cosine, s = *sine, d = *dx] { rotate(g, c, s, d, true); }, workspace, executor);
}
EXECUTES(aclnnRotaryPositionEmbeddingGrad)
