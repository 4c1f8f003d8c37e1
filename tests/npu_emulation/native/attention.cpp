// aclnnFlashAttention*: softmax(scale q k') v with Ascend's argument checks, layouts, sparse modes and statistics.
//
// Checked and laid out as the documentation of npu_fusion_attention says; computed row by row in fp32. What is not
// emulated is refused, never ignored; what the real operator ignores in silence (a sparse mode without its mask) is
// ignored here too, with a line on stderr.

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "call_log.hpp"
#include "objects.hpp"

namespace {

constexpr int kCopies = 8;  // equal copies of each statistic
constexpr int64_t kMaskSize = 2048, kMaxTokens = 1 << 20, kMaxSequences = 1024, kMaxHeads = 256, kMaxHeadDim = 768;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

enum Sparse { kDefault = 0, kAllMask = 1, kLeftUpCausal = 2, kRightDownCausal = 3, kBand = 4 };

// Strides of a [batch, token, head, dim] view of any layout.
struct View {
    const Tensor* tensor;
    int64_t batch, token, head;
    int64_t row(int64_t b, int64_t t, int64_t h) const { return tensor->offset + b * batch + t * token + h * head; }
};

struct Span {
    int64_t from, to;
};

struct Attention {
    Tensor q, k, v;
    bool has_mask = false;
    Tensor mask;
    float scale;
    int64_t before, after;  // pre_tokens, next_tokens
    int64_t heads, sparse;
    std::string layout;
    std::vector<int64_t> q_ends, k_ends;
    int64_t batch, kv_heads, head_dim, value_dim, q_length, k_length;

    bool packed() const { return layout == "TND"; }

    View view(const Tensor& t) const {
        if (layout == "BNSD") return {&t, t.strides[0], t.strides[2], t.strides[1]};
        if (layout == "BSND") return {&t, t.strides[0], t.strides[1], t.strides[2]};
        return {&t, 0, t.strides[0], t.strides[1]};
    }
    Status check(const char* name);
    Span span(int64_t i, int64_t rows, int64_t columns) const;
    bool hidden(int64_t b, int64_t h, int64_t i, int64_t j) const;
};

struct Document {
    int64_t batch, q_start, k_start, rows, columns;
};

std::vector<Document> documents(const Attention& a) {
    std::vector<Document> found;
    int64_t q = 0, k = 0;
    for (int64_t b = 0; b < a.batch; b++) {
        if (!a.packed()) {
            found.push_back({b, 0, 0, a.q_length, a.k_length});
            continue;
        }
        found.push_back({0, q, k, a.q_ends[b] - q, a.k_ends[b] - k});
        q = a.q_ends[b], k = a.k_ends[b];
    }
    return found;
}

Status check_ends(const char* name, const std::vector<int64_t>& ends, int64_t tokens) {
    if (ends.empty()) return refuse(name, "TND needs actual_seq_qlen and actual_seq_kvlen");
    if (int64_t(ends.size()) > kMaxSequences) return refuse(name, "more than 1024 sequences");
    if (!std::is_sorted(ends.begin(), ends.end())) return refuse(name, "sequence lengths must be cumulative");
    if (ends.back() != tokens) return refuse(name, "the last cumulative length is not the number of tokens");
    return kOk;
}

Status Attention::check(const char* name) {
    if (q.dtype != k.dtype || q.dtype != v.dtype) return refuse(name, "query, key and value have different dtypes");
    if (q.dtype != kFp32 && q.dtype != kFp16 && q.dtype != kBf16) return refuse(name, "dtype is not fp16, bf16 or fp32");
    if (layout != "BNSD" && layout != "BSND" && layout != "TND") return refuse(name, "this layout is not emulated");
    const int head = layout == "BNSD" ? 3 : 2, token = packed() ? 3 : layout == "BNSD" ? 2 : 3;
    head_dim = q.size(1), value_dim = v.size(1), kv_heads = k.size(head);
    q_length = q.size(token), k_length = k.size(token);
    if (q.size(head) != heads) return refuse(name, "head_num is not the query's number of heads");
    if (kv_heads < 1 || heads % kv_heads) return refuse(name, "query heads are not a multiple of key heads");
    if (heads > kMaxHeads || head_dim > kMaxHeadDim) return refuse(name, "more than 256 heads or 768 dimensions");
    if (q_length > kMaxTokens || k_length > kMaxTokens) return refuse(name, "more than 1M tokens");
    batch = packed() ? int64_t(q_ends.size()) : q.sizes[0];
    if (packed() && (check_ends(name, q_ends, q_length) || check_ends(name, k_ends, k_length))) return kInvalid;
    if (packed() && q_ends.size() != k_ends.size()) return refuse(name, "unequal numbers of query and key sequences");
    if (sparse > kBand || sparse < 0) return refuse(name, "this sparse mode is not emulated");
    if (has_mask && mask.dtype != kBool && mask.dtype != kUint8) return refuse(name, "the mask is not bool or uint8");
    if (sparse >= kLeftUpCausal && !has_mask) {
        fprintf(stderr, "EMULATED %s: sparse mode %ld without a mask does nothing; attention is full\n", name, long(sparse));
        sparse = kDefault;
    }
    if (sparse >= kLeftUpCausal && (mask.size(1) != kMaskSize || mask.size(2) != kMaskSize))
        return refuse(name, "sparse modes 2 to 4 take the compressed 2048 x 2048 mask");
    return kOk;
}

// Keys that the sparse mode lets query `i` see.
Span Attention::span(int64_t i, int64_t rows, int64_t columns) const {
    const int64_t shift = columns - rows;
    int64_t from = 0, to = columns;
    if (sparse == kLeftUpCausal) to = i + 1;
    if (sparse == kRightDownCausal) to = i + shift + 1;
    if (sparse == kBand) from = i + shift - before, to = i + shift + after + 1;
    return {std::max<int64_t>(from, 0), std::min(to, columns)};
}

// Whether a mask of its own hides key `j` from query `i`; the sparse modes' compressed mask hides nothing more.
bool Attention::hidden(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (!has_mask || sparse >= kLeftUpCausal) return false;
    const int64_t index[] = {b, h, i, j};
    int64_t place = mask.offset;
    const size_t dims = mask.sizes.size();
    for (size_t dim = 0; dim < dims; dim++) place += mask.sizes[dim] == 1 ? 0 : index[4 - dims + dim] * mask.strides[dim];
    return mask.get(place) != 0;
}

// One head of one document, rows contiguous.
std::vector<float> rows_of(const View& view, int64_t b, int64_t start, int64_t rows, int64_t head, int64_t dim) {
    std::vector<float> found(rows * dim);
    for (int64_t t = 0; t < rows; t++)
        for (int64_t d = 0; d < dim; d++) found[t * dim + d] = view.tensor->get(view.row(b, start + t, head) + d);
    return found;
}

void add_rows(const View& view, int64_t b, int64_t start, int64_t head, int64_t dim, const std::vector<float>& values,
              std::vector<float>& into) {
    for (size_t i = 0; i < values.size(); i++)
        into[view.row(b, start + i / dim, head) + i % dim - view.tensor->offset] += values[i];
}

float dot(const float* a, const float* b, int64_t count) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) sum += a[i] * b[i];
    return sum;
}

void add(float* into, float factor, const float* values, int64_t count) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) into[i] += factor * values[i];
}

// [rows, dim] to [dim, rows].
std::vector<float> turned(const std::vector<float>& rows, int64_t dim) {
    std::vector<float> found(rows.size());
    const int64_t count = rows.size() / dim;
    for (int64_t i = 0; i < count; i++)
        for (int64_t d = 0; d < dim; d++) found[d * count + i] = rows[i * dim + d];
    return found;
}

// Products of one row with those of a span, which are `columns` turned: long loops, where `dot` has short ones.
void products(const float* row, const std::vector<float>& columns, int64_t dim, Span span, std::vector<float>& into) {
    std::fill(into.begin() + span.from, into.begin() + span.to, 0.f);
    for (int64_t d = 0; d < dim; d++)
        add(&into[span.from], row[d], &columns[d * into.size() + span.from], span.to - span.from);
}

// Where the statistics of a row are: [T, N, 8] for packs in layout TND, else [B, N, S, 8].
int64_t statistic(const Attention& a, const Document& doc, int64_t head, int64_t i) {
    if (a.packed()) return ((doc.q_start + i) * a.heads + head) * kCopies;
    return ((doc.batch * a.heads + head) * a.q_length + i) * kCopies;
}

void forward(const Attention& a, const Tensor& maxima, const Tensor& sums, const Tensor& out) {
    const View q = a.view(a.q), k = a.view(a.k), v = a.view(a.v), o = a.view(out);
    for (const Document& doc : documents(a)) {
        for (int64_t head = 0; head < a.heads; head++) {
            const int64_t kv_head = head / (a.heads / a.kv_heads);
            const auto queries = rows_of(q, doc.batch, doc.q_start, doc.rows, head, a.head_dim);
            const auto keys = turned(rows_of(k, doc.batch, doc.k_start, doc.columns, kv_head, a.head_dim), a.head_dim);
            const auto values = rows_of(v, doc.batch, doc.k_start, doc.columns, kv_head, a.value_dim);
            std::vector<float> scores(doc.columns), row(a.value_dim);
            for (int64_t i = 0; i < doc.rows; i++) {
                const Span span = a.span(i, doc.rows, doc.columns);
                float top = kNothing;
                products(&queries[i * a.head_dim], keys, a.head_dim, span, scores);
                for (int64_t j = span.from; j < span.to; j++) {
                    scores[j] = a.hidden(doc.batch, head, i, j) ? kNothing : a.scale * scores[j];
                    top = std::max(top, scores[j]);
                }
                double sum = 0;
                std::fill(row.begin(), row.end(), 0.f);
                for (int64_t j = span.from; j < span.to; j++) {
                    if (scores[j] == kNothing) continue;
                    const float weight = std::exp(scores[j] - top);
                    sum += weight;
                    add(row.data(), weight, &values[j * a.value_dim], a.value_dim);
                }
                for (int64_t d = 0; d < a.value_dim; d++)
                    out.set(o.row(doc.batch, doc.q_start + i, head) + d, sum > 0 ? float(row[d] / sum) : 0.f);
                const int64_t place = statistic(a, doc, head, i);
                for (int copy = 0; copy < kCopies; copy++) maxima.set(place + copy, top), sums.set(place + copy, float(sum));
            }
        }
    }
}

// Gradients with the softmax rebuilt from its statistics: p = exp(score - max) / sum, whatever softmax those belong to.
void backward(const Attention& a, const Tensor& grad, const Tensor& maxima, const Tensor& sums, const Tensor& out,
              const Tensor& dq, const Tensor& dk, const Tensor& dv) {
    const View q = a.view(a.q), k = a.view(a.k), v = a.view(a.v), o = a.view(out), g = a.view(grad);
    std::vector<float> all_dq(dq.count()), all_dk(dk.count()), all_dv(dv.count());
    for (const Document& doc : documents(a)) {
        for (int64_t head = 0; head < a.heads; head++) {
            const int64_t kv_head = head / (a.heads / a.kv_heads), dim = a.head_dim, wide = a.value_dim;
            const auto queries = rows_of(q, doc.batch, doc.q_start, doc.rows, head, dim);
            const auto keys = rows_of(k, doc.batch, doc.k_start, doc.columns, kv_head, dim);
            const auto values = rows_of(v, doc.batch, doc.k_start, doc.columns, kv_head, wide);
            const auto outs = rows_of(o, doc.batch, doc.q_start, doc.rows, head, wide);
            const auto grads = rows_of(g, doc.batch, doc.q_start, doc.rows, head, wide);
            const auto turned_keys = turned(keys, dim), turned_values = turned(values, wide);
            std::vector<float> to_q(queries.size()), to_k(keys.size()), to_v(values.size());
            std::vector<float> scores(doc.columns), to_weights(doc.columns);
            for (int64_t i = 0; i < doc.rows; i++) {
                const int64_t place = statistic(a, doc, head, i);
                const float top = maxima.get(place), sum = sums.get(place);
                if (!(sum > 0)) continue;
                const float delta = dot(&grads[i * wide], &outs[i * wide], wide);
                const Span span = a.span(i, doc.rows, doc.columns);
                products(&queries[i * dim], turned_keys, dim, span, scores);
                products(&grads[i * wide], turned_values, wide, span, to_weights);
                for (int64_t j = span.from; j < span.to; j++) {
                    if (a.hidden(doc.batch, head, i, j)) continue;
                    const float weight = std::exp(a.scale * scores[j] - top) / sum;
                    const float ds = a.scale * weight * (to_weights[j] - delta);
                    add(&to_v[j * wide], weight, &grads[i * wide], wide);
                    add(&to_q[i * dim], ds, &keys[j * dim], dim);
                    add(&to_k[j * dim], ds, &queries[i * dim], dim);
                }
            }
            add_rows(a.view(dq), doc.batch, doc.q_start, head, dim, to_q, all_dq);
            add_rows(a.view(dk), doc.batch, doc.k_start, kv_head, dim, to_k, all_dk);
            add_rows(a.view(dv), doc.batch, doc.k_start, kv_head, wide, to_v, all_dv);
        }
    }
    dq.write(all_dq), dk.write(all_dk), dv.write(all_dv);  // torch_npu makes them contiguous
}

void log_call(const char* name, const Attention& a) {
    FILE* file = call_log();
    if (!file) return;
    fprintf(file, "EMULATED %s layout=%s queries=%ld keys=%ld heads=%ld kv_heads=%ld dim=%ld sparse=%ld mask=%d documents=%zu\n",
            name, a.layout.c_str(), long(a.q_length), long(a.k_length), long(a.heads), long(a.kv_heads), long(a.head_dim),
            long(a.sparse), a.has_mask, a.packed() ? a.q_ends.size() : size_t(a.batch));
    fflush(file);
}

Attention described(Tensor* q, Tensor* k, Tensor* v, Tensor* mask, IntArray* q_ends, IntArray* k_ends, double scale,
                    int64_t before, int64_t after, int64_t heads, const char* layout, int64_t sparse) {
    Attention a;
    a.q = *q, a.k = *k, a.v = *v;
    if (mask) a.has_mask = true, a.mask = *mask;
    if (q_ends) a.q_ends = q_ends->values;
    if (k_ends) a.k_ends = k_ends->values;
    a.scale = float(scale), a.before = before, a.after = after, a.heads = heads, a.layout = layout, a.sparse = sparse;
    return a;
}

Status checked(const char* name, Attention& a, Tensor* shift, Tensor* padding, double keep) {
    if (keep < 1) return refuse(name, "dropout is not emulated");
    if (shift || padding) return refuse(name, "position shifts and padding masks are not emulated");
    if (Status status = a.check(name)) return status;
    log_call(name, a);
    return kOk;
}

Status plan_forward(const char* name, Attention a, Tensor* shift, Tensor* padding, double keep, Tensor* maxima,
                    Tensor* sums, Tensor* out, uint64_t* workspace, void** executor) {
    if (Status status = checked(name, a, shift, padding, keep)) return status;
    return planned([a, m = *maxima, s = *sums, o = *out] { forward(a, m, s, o); }, workspace, executor);
}

Status plan_backward(const char* name, Attention a, Tensor* shift, Tensor* padding, double keep, Tensor* grad,
                     Tensor* maxima, Tensor* sums, Tensor* out, Tensor* dq, Tensor* dk, Tensor* dv, uint64_t* workspace,
                     void** executor) {
    if (Status status = checked(name, a, shift, padding, keep)) return status;
    auto plan = [a, g = *grad, m = *maxima, s = *sums, o = *out, x = *dq, y = *dk, z = *dv] { backward(a, g, m, s, o, x, y, z); };
    return planned(plan, workspace, executor);
}

}  // namespace

API Status aclnnFlashAttentionScoreGetWorkspaceSize(
    Tensor* q, Tensor* k, Tensor* v, Tensor* shift, Tensor*, Tensor* padding, Tensor* mask, IntArray*, double scale,
    double keep, int64_t before, int64_t after, int64_t heads, char* layout, int64_t, int64_t sparse, Tensor* maxima,
    Tensor* sums, Tensor*, Tensor* out, uint64_t* workspace, void** executor) {
    Attention a = described(q, k, v, mask, nullptr, nullptr, scale, before, after, heads, layout, sparse);
    return plan_forward("FlashAttentionScore", a, shift, padding, keep, maxima, sums, out, workspace, executor);
}
EXECUTES(aclnnFlashAttentionScore)

API Status aclnnFlashAttentionScoreGradGetWorkspaceSize(
    Tensor* q, Tensor* k, Tensor* v, Tensor* grad, Tensor* shift, Tensor*, Tensor* padding, Tensor* mask, Tensor* maxima,
    Tensor* sums, Tensor*, Tensor* out, IntArray*, double scale, double keep, int64_t before, int64_t after,
    int64_t heads, char* layout, int64_t, int64_t sparse, Tensor* dq, Tensor* dk, Tensor* dv, Tensor*,
    uint64_t* workspace, void** executor) {
    Attention a = described(q, k, v, mask, nullptr, nullptr, scale, before, after, heads, layout, sparse);
    return plan_backward("FlashAttentionScoreGrad", a, shift, padding, keep, grad, maxima, sums, out, dq, dk, dv, workspace, executor);
}
EXECUTES(aclnnFlashAttentionScoreGrad)

// Packs whose statistics are laid out as the tokens are (softmax_layout="TND"); the other order is not emulated.
API Status aclnnFlashAttentionVarLenScoreV4GetWorkspaceSize(
    Tensor* q, Tensor* k, Tensor* v, Tensor* shift, Tensor*, Tensor* padding, Tensor* mask, IntArray*, IntArray* q_ends,
    IntArray* k_ends, double scale, double keep, int64_t before, int64_t after, int64_t heads, char* layout, int64_t,
    int64_t sparse, char*, Tensor* maxima, Tensor* sums, Tensor*, Tensor* out, uint64_t* workspace, void** executor) {
    Attention a = described(q, k, v, mask, q_ends, k_ends, scale, before, after, heads, layout, sparse);
    return plan_forward("FlashAttentionVarLenScore", a, shift, padding, keep, maxima, sums, out, workspace, executor);
}
EXECUTES(aclnnFlashAttentionVarLenScoreV4)

API Status aclnnFlashAttentionUnpaddingScoreGradV4GetWorkspaceSize(
    Tensor* q, Tensor* k, Tensor* v, Tensor* grad, Tensor* shift, Tensor*, Tensor* padding, Tensor* mask, Tensor* maxima,
    Tensor* sums, Tensor*, Tensor* out, IntArray*, IntArray* q_ends, IntArray* k_ends, double scale, double keep,
    int64_t before, int64_t after, int64_t heads, char* layout, int64_t, int64_t sparse, Tensor* dq, Tensor* dk,
    Tensor* dv, Tensor*, char*, uint64_t* workspace, void** executor) {
    Attention a = described(q, k, v, mask, q_ends, k_ends, scale, before, after, heads, layout, sparse);
    return plan_backward("FlashAttentionVarLenScoreGrad", a, shift, padding, keep, grad, maxima, sums, out, dq, dk, dv, workspace, executor);
}
EXECUTES(aclnnFlashAttentionUnpaddingScoreGradV4)
