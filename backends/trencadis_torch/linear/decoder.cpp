// A whole decoder on a CPU in one call and one team of threads: embeddings, layers, final norm, output projection.
//
//     layer    norm ▶ queries, keys, values, normed and turned where they are made ▶ cache and attention ▶ output, added
//              norm ▶ gates and values, activated where they are made ▶ down, added
//     last     behind its attention, only tokens go on whose logits are asked for
//
// Threads take panels of weights as they come and wait for each other where one operation reads what another wrote. Few rows are
// normed, or quantised, by every thread for itself, which is quicker than waiting. All sums are those of linear.h: a row's bits depend
// on that row alone, and are those of the same operations one by one.
//
// Memory is the caller's: nothing is allocated here. Attention is another library's, called by its address.
//
// Shapes: T tokens, L of them kept, H hidden size, W query, key and value heads together, I intermediate size, V vocabulary.

#include <ctime>
#include <initializer_list>

#include "linear.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

constexpr int64_t FEW = 4;          // rows that every thread prepares for itself
constexpr int64_t ROW_BLOCK = 240;  // rows of one piece of work
constexpr int64_t TILE_ROWS = 48;   // rows whose gates wait for their values
constexpr int64_t TILE = TILE_ROWS * PANEL;

// Mirrored by ctypes structures in native_decoder.py: the same fields in the same order, 8 bytes each.
struct Product {
    const void* weights;         // packed, float32, or int8 with scales
    const float* scales;         // null: float32
    const int32_t* sums;
    const float* bias;
    int64_t num_outputs, num_inputs;
};

struct Layer {
    Product qkv, out, gate_up, down;
    const float *attention_norm, *query_norm, *key_norm, *mlp_norm;     // those of heads may be null
    const float *attended_norm, *projected_norm;                        // before what is added; null: none
    int64_t num_heads, num_kv_heads, head_dim, activation;
    double eps, head_eps;
};

struct Decoder {
    const Layer* layers;
    Product head;
    const float *final_norm, *embeddings;  // embeddings [V, H]; null: rows of the head
    int64_t num_layers, hidden_size, num_embeddings;
    double eps, embedding_scale;
};

typedef int64_t (*Attend)(const void* call);

enum Part { EMBEDDINGS, NORMS, QKV, ATTENTION, OUT, GATE_UP, DOWN, HEAD, NUM_PARTS };

struct Pass {
    const int64_t *token_ids, *positions, *kept;  // [T], [T], ascending indices [L]
    const float *cosines, *sines;                 // of every position, [positions, turned]
    const char* calls;                            // of attention, one for each layer
    Attend attend;
    float *hidden, *normed, *qkv, *attended, *gated, *wide, *logits;  // [T, H], [T, H], [T, W], [T, H D], [T, I], [T, 2 I], [L, V]
    uint8_t* bytes;        // [T, widest input], of int8 products
    float* scales;         // [T]
    float* scratch;        // of each thread
    double* seconds;       // CPU time of the first thread, added by part; null: not measured
    int64_t num_tokens, num_kept, call_bytes, num_turned, scratch_floats, num_threads;
};

// Greedy continuations: of each sequence the newest token, which every step replaces. Those with most guesses come first.
struct Guesses {
    const int32_t *tables, *rows;          // block tables [rows, table_stride], row of each sequence [B]
    int32_t* starts;                       // where its newest token stands [B]
    const int32_t* counts;                 // guesses of each, the first one there already, falling [B]
    int64_t *slots, *token_ids, *positions;  // of the newest tokens [B]; attention and pass read these arrays
    int32_t* tokens;                       // all guesses [most counts, B]; the first row is there
    const uint8_t* closed;                 // tokens that are never chosen [V]; null: none
    int64_t table_stride, block_size, num_sequences, vocab_size;
    int64_t sequences_at, tokens_at;       // bytes from the start of a call of attention to its numbers
};

// Rows that go into a product: floats, or int8 and their scales.
struct Input {
    const float* rows;
    const uint8_t* bytes;
    const float* scales;
};

int64_t widest_input(const Decoder& d) {
    int64_t widest = d.hidden_size;
    for (int64_t i = 0; i < d.num_layers; ++i)
        for (int64_t inputs : {d.layers[i].out.num_inputs, d.layers[i].down.num_inputs})
            widest = inputs > widest ? inputs : widest;
    return padded(widest);
}

int64_t scratch_floats(const Decoder& d) {
    const int64_t rows = FEW * widest_input(d), tiles = 2 * TILE;
    return (rows + rows / 4 + FEW + tiles + 63) / 16 * 16;
}

bool is_aligned(const Product& gate_up) { return gate_up.num_outputs / 2 % PANEL == 0; }

// What one thread of the team does; all do the same, and share the loops.
class Member {
   public:
    Member(const Decoder& decoder, const Pass& pass, int64_t thread)
        : d(decoder), p(pass), widest(widest_input(decoder)), rows(pass.num_tokens), hidden(pass.hidden), normed(pass.normed) {
        own_rows = p.scratch + thread * p.scratch_floats;
        own_scales = own_rows + FEW * widest;
        tiles = own_scales + FEW;
        own_bytes = reinterpret_cast<uint8_t*>(tiles + 2 * TILE);
        timed = thread == 0 && p.seconds;
        if (timed) since = now();
    }

    int64_t run() {
        int64_t failed = 0;
        embed();
        for (int64_t i = 0; i < d.num_layers; ++i) {
            const Layer& layer = d.layers[i];
            heads(layer);
            failed |= p.attend(p.calls + i * p.call_bytes);
            mark(ATTENTION);
            const float* attended = p.attended;
            if (i + 1 == d.num_layers && p.num_kept < p.num_tokens) attended = keep(layer);
            add(layer.out, input(attended, layer.out.num_inputs, layer.out), layer.attended_norm, layer.eps, OUT);
            gates(layer);
            add(layer.down, input(p.gated, layer.down.num_inputs, layer.down), layer.projected_norm, layer.eps, DOWN);
        }
        const Input last = input(hidden, d.hidden_size, d.head, d.final_norm, d.eps);
        multiply(d.head, last, Linear{d.head.bias, p.logits, d.head.num_outputs, d.head.num_outputs, d.head.num_inputs});
        mark(HEAD);
        return failed;
    }

   private:
    const Decoder& d;
    const Pass& p;
    int64_t widest, rows;
    float *hidden, *normed;  // change places when rows become fewer
    float *own_rows, *own_scales, *tiles;
    uint8_t* own_bytes;
    bool timed;
    double since = 0.0;

    static double now() {
        timespec at;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &at);
        return static_cast<double>(at.tv_sec) + 1e-9 * static_cast<double>(at.tv_nsec);
    }

    void mark(Part part) {
        if (!timed) return;
        const double at = now();
        p.seconds[part] += at - since;
        since = at;
    }

    void embed() {
        const float scale = static_cast<float>(d.embedding_scale);
#pragma omp for schedule(static)
        for (int64_t m = 0; m < rows; ++m) {
            const int64_t id = p.token_ids[m];
            float* row = hidden + m * d.hidden_size;
            if (d.embeddings) {
                for (int64_t k = 0; k < d.hidden_size; ++k) row[k] = d.embeddings[id * d.hidden_size + k] * scale;
            } else if (d.head.scales) {
                read_row(static_cast<const int8_t*>(d.head.weights), d.head.scales, id, d.hidden_size, scale, row);
            } else {
                read_row(static_cast<const float*>(d.head.weights), id, d.hidden_size, scale, row);
            }
        }
        mark(EMBEDDINGS);
    }

    // Queries, keys and values of all tokens.
    void heads(const Layer& layer) {
        const int64_t size = layer.head_dim, stride = layer.qkv.num_outputs, turned = layer.num_heads + layer.num_kv_heads;
        const Input in = input(hidden, d.hidden_size, layer.qkv, layer.attention_norm, layer.eps);
        int64_t panels = 1;  // as many as end where a head does
        while (panels * PANEL % size) ++panels;
        multiply(layer.qkv, in, Linear{layer.qkv.bias, p.qkv, stride, stride, layer.qkv.num_inputs}, panels,
                 [&](int64_t first, int64_t last, int64_t row, int64_t end) {
                     for (; row < end; ++row)
                         for (int64_t h = first / size; h < last / size && h < turned; ++h) turn(layer, row, h);
                 });
        mark(QKV);
    }

    void turn(const Layer& layer, int64_t row, int64_t h) const {
        float* head = p.qkv + row * layer.qkv.num_outputs + h * layer.head_dim;
        const float* norm = h < layer.num_heads ? layer.query_norm : layer.key_norm;
        if (norm) norm_row(head, norm, static_cast<float>(layer.head_eps), layer.head_dim, head);
        const int64_t at = p.positions[row] * p.num_turned;
        rotate_head(head, p.cosines + at, p.sines + at, p.num_turned / 2);
    }

    // Only some tokens go on: theirs is copied together. Queries, keys and values have been used, and leave room.
    const float* keep(const Layer& layer) {
        const int64_t size = layer.out.num_inputs;
        rows = p.num_kept;
#pragma omp for schedule(static)
        for (int64_t m = 0; m < rows; ++m) {
            std::memcpy(p.qkv + m * size, p.attended + p.kept[m] * size, static_cast<size_t>(size) * sizeof(float));
            std::memcpy(normed + m * d.hidden_size, hidden + p.kept[m] * d.hidden_size,
                        static_cast<size_t>(d.hidden_size) * sizeof(float));
        }
        float* const other = hidden;
        hidden = normed;
        normed = other;
        return p.qkv;
    }

    void gates(const Layer& layer) {
        const Product& w = layer.gate_up;
        const Input in = input(hidden, d.hidden_size, w, layer.mlp_norm, layer.eps);
        const int64_t size = w.num_outputs / 2;
        if (!is_aligned(w)) {
            multiply(w, in, Linear{w.bias, p.wide, 2 * size, 2 * size, w.num_inputs});
#pragma omp for schedule(static)
            for (int64_t m = 0; m < rows; ++m) {
                const float* row = p.wide + m * 2 * size;
                gate_row(row, row + size, size, layer.activation, p.gated + m * size);
            }
            mark(GATE_UP);
            return;
        }
        const int64_t blocks = num_blocks();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < size / PANEL * blocks; ++i) {
            const int64_t first = i / blocks * PANEL, row = block(i % blocks), end = block(i % blocks + 1);
            for (int64_t m = row; m < end; m += TILE_ROWS)
                gate(layer, in, m, m + TILE_ROWS < end ? m + TILE_ROWS : end, first);
        }
        mark(GATE_UP);
    }

    // Some rows' activated gates times values, for one panel of each.
    void gate(const Layer& layer, const Input& in, int64_t row, int64_t end, int64_t first) {
        const Product& w = layer.gate_up;
        const int64_t size = w.num_outputs / 2;
        float* const values = tiles + TILE;
        const Linear left{w.bias, tiles, PANEL, w.num_outputs, w.num_inputs, false, row, first};
        const Linear right{w.bias, values, PANEL, w.num_outputs, w.num_inputs, false, row, first + size};
        in_runs(row, end, [&](int64_t m, int count) { panel(w, in, left, m, count, first); });
        in_runs(row, end, [&](int64_t m, int count) { panel(w, in, right, m, count, first + size); });
        for (int64_t m = 0; m < end - row; ++m)
            gate_row(tiles + m * PANEL, values + m * PANEL, PANEL, layer.activation, p.gated + (row + m) * size + first);
    }

    // Add a product to the hidden states; where it is normed before, by way of `wide`.
    void add(const Product& w, const Input& in, const float* norm, double eps, Part part) {
        const int64_t size = d.hidden_size;
        if (!norm) {
            multiply(w, in, Linear{w.bias, hidden, size, w.num_outputs, w.num_inputs, true});
        } else {
            multiply(w, in, Linear{w.bias, p.wide, size, w.num_outputs, w.num_inputs});
#pragma omp for schedule(static)
            for (int64_t m = 0; m < rows; ++m) {
                float *row = p.wide + m * size, *sum = hidden + m * size;
                norm_row(row, norm, static_cast<float>(eps), size, row);
                for (int64_t k = 0; k < size; ++k) sum[k] += row[k];
            }
        }
        mark(part);
    }

    // What goes into a product: rows, normed where a norm is given, quantised where the weights are.
    Input input(const float* x, int64_t size, const Product& w, const float* norm = nullptr, double eps = 0.0) {
        const bool quantised = w.scales;
        if (!norm && !quantised) return {x, nullptr, nullptr};
        const int64_t depth = padded(size);
        if (rows <= FEW) {
            for (int64_t m = 0; m < rows; ++m)
                prepare(x + m * size, size, norm, eps, quantised, own_rows + m * size, own_bytes + m * depth, own_scales + m);
            if (norm) mark(NORMS);
            return {own_rows, own_bytes, own_scales};
        }
#pragma omp for schedule(static)
        for (int64_t m = 0; m < rows; ++m)
            prepare(x + m * size, size, norm, eps, quantised, quantised ? own_rows : normed + m * size, p.bytes + m * depth, p.scales + m);
        if (norm) mark(NORMS);
        return {normed, p.bytes, p.scales};
    }

    static void prepare(const float* x, int64_t size, const float* norm, double eps, bool quantised, float* row, uint8_t* bytes,
                        float* scale) {
        if (norm) norm_row(x, norm, static_cast<float>(eps), size, row);
        if (quantised) quantise_row(norm ? row : x, size, bytes, scale);
    }

    int64_t num_blocks() const { return (rows + ROW_BLOCK - 1) / ROW_BLOCK; }
    int64_t block(int64_t i) const { return rows * i / (num_blocks() ? num_blocks() : 1); }

    void multiply(const Product& w, const Input& in, const Linear& layer) {
        multiply(w, in, layer, 1, [](int64_t, int64_t, int64_t, int64_t) {});
    }

    // A product of all rows; `after` each piece of some panels, its thread goes on with the outputs and rows it has made.
    template <typename After>
    void multiply(const Product& w, const Input& in, const Linear& layer, int64_t panels, const After& after) {
        const int64_t blocks = num_blocks(), width = panels * PANEL, pieces = (w.num_outputs + width - 1) / width * blocks;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < pieces; ++i) {
            const int64_t first = i / blocks * width, row = block(i % blocks), end = block(i % blocks + 1);
            const int64_t last = first + width < w.num_outputs ? first + width : w.num_outputs;
            for (int64_t output = first; output < last; output += PANEL)
                in_runs(row, end, [&](int64_t m, int count) { panel(w, in, layer, m, count, output); });
            after(first, last, row, end);
        }
    }

    // Some rows' outputs of one panel.
    void panel(const Product& w, const Input& in, const Linear& layer, int64_t row, int count, int64_t first) const {
        if (!w.scales) {
            const float* weights = static_cast<const float*>(w.weights) + first * w.num_inputs;
            BY_SIZE(count, float_rows, layer, in.rows, w.num_inputs, weights, row, first)
            return;
        }
        const int64_t depth = padded(w.num_inputs);
        const Quantised given{in.bytes, in.scales, w.scales, w.sums, depth};
        const int8_t* weights = static_cast<const int8_t*>(w.weights) + first * depth;
        BY_SIZE(count, int_rows, layer, given, weights, row, first)
    }
};

// Index of the largest of some logits that are not closed; the lowest of equal ones.
int64_t largest(const float* logits, int64_t size, const uint8_t* closed) {
    int64_t found = -1;
    for (int64_t k = 0; k < size; ++k)
        if ((found < 0 || logits[k] > logits[found]) && !(closed && closed[k])) found = k;
    return found < 0 ? 0 : found;
}

}  // namespace

extern "C" {

// Bytes of the structures that the caller makes.
int64_t trencadis_decoder_bytes() { return sizeof(Decoder) + sizeof(Layer) + sizeof(Pass) + sizeof(Guesses); }

int64_t trencadis_decoder_parts() { return NUM_PARTS; }

// Elements of the widest row that is quantised, and floats of one thread's scratch.
int64_t trencadis_decoder_widest(const Decoder* decoder) { return widest_input(*decoder); }
int64_t trencadis_decoder_scratch(const Decoder* decoder) { return scratch_floats(*decoder); }

// Write the logits of the kept tokens, and keys and values of all. Returns 0; 1 if attention found no memory; 2 if a token has no
// embedding.
int64_t trencadis_decode(const Decoder* decoder, const Pass* pass) {
    for (int64_t m = 0; m < pass->num_tokens; ++m)
        if (pass->token_ids[m] < 0 || pass->token_ids[m] >= decoder->num_embeddings) return 2;
    int64_t failed = 0;
#pragma omp parallel num_threads(static_cast<int>(pass->num_threads)) if (pass->num_threads > 1) reduction(| : failed)
    {
#ifdef _OPENMP
        const int64_t thread = omp_get_thread_num();
#else
        const int64_t thread = 0;
#endif
        failed |= Member(*decoder, *pass, thread).run();
    }
    return failed ? 1 : 0;
}

// Add guesses until every sequence has its own number; writes keys and values of all but the last of each. Returns as trencadis_decode.
int64_t trencadis_guess(const Decoder* decoder, Pass* pass, const Guesses* g) {
    int64_t count = g->num_sequences;
    for (int64_t step = 1;; ++step) {
        while (count > 0 && g->counts[count - 1] <= step) --count;
        if (count == 0) return 0;
        for (int64_t i = 0; i < count; ++i) {
            const int64_t at = g->positions[i] = g->starts[i];
            g->slots[i] = g->tables[g->rows[i] * g->table_stride + at / g->block_size] * g->block_size + at % g->block_size;
        }
        for (int64_t i = 0; i < decoder->num_layers; ++i) {
            char* call = const_cast<char*>(pass->calls) + i * pass->call_bytes;
            *reinterpret_cast<int64_t*>(call + g->sequences_at) = *reinterpret_cast<int64_t*>(call + g->tokens_at) = count;
        }
        pass->num_tokens = pass->num_kept = count;
        const int64_t failed = trencadis_decode(decoder, pass);
        if (failed) return failed;
        for (int64_t i = 0; i < count; ++i) {
            g->token_ids[i] = largest(pass->logits + i * g->vocab_size, g->vocab_size, g->closed);
            g->tokens[step * g->num_sequences + i] = static_cast<int32_t>(g->token_ids[i]);
            ++g->starts[i];
        }
    }
}

}  // extern "C"
