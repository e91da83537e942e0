// A whole decoder on a CPU in one call and one team of threads: embeddings, layers, final norm, output projection.
//
//     layer    norm ▶ queries, keys, values, normed and turned where they are made ▶ cache and attention ▶ output ▶ norm, added
//              norm ▶ gates and values, activated where they are made ▶ down ▶ norm, added
//              norm ▶ router ▶ experts, see experts.h ▶ + the MLP beside them, if there is one ▶ norm, added
//     last     behind its attention, only tokens go on whose logits are asked for
//
// Any of a layer's four norms may be missing. Where attention and MLP are parallel, both begin with the layer's input.
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

#include "experts.h"
#include "linear.h"
#include "rows.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

constexpr int64_t FEW = 4;          // rows that every thread prepares for itself
constexpr int64_t ROW_BLOCK = 240;  // rows of one piece of work
constexpr int64_t PIECE_BYTES = 1 << 17;  // of weights in one piece for few rows: memory that is read on and on is read quickest
constexpr int64_t PIECES_EACH = 4;        // of a thread's, at least: threads end together

// Mirrored by ctypes structures in native_decoder.py: the same fields in the same order, 8 bytes each.
struct Norm {
    const float *weight, *bias;  // null weight: no norm; null bias: none
    double eps;
    int64_t centred;             // by mean and variance; else by the mean square
};

// How attention's output a and the MLP's m are added to the hidden states h: the MLP begins with h + a, or with h as attention does.
enum Order : int64_t { SEQUENTIAL, PARALLEL, PARALLEL_FIRST };  // parallel: (h + a) + m; first: h + (a + m)

struct Layer {
    Product qkv, out, gate_up, down;                                    // gate_up is of gates and values, or of values alone
    Norm attention_norm, attended_norm, mlp_norm, projected_norm;       // attended and projected: before what is added
    const float *query_norm, *key_norm;                                 // both may be null
    int64_t num_heads, num_kv_heads, head_dim, how, angles;             // how: see Heads; angles: which of them; below 0: none
    int64_t activation, gated, order;
    double head_eps, attended_scale, projected_scale;                   // scales: of what is added
    Mixture mixture;                                                    // gate_up and down are beside its experts, or have no outputs
};

// What a head's layer begins with: the token's embedding beside the hidden state that is handed in.
struct Joined {
    Product states;        // makes that hidden state from those of a model
    Norm embedding_norm, hidden_norm;
    int64_t keeps_normed;  // attention's output is added to the normed hidden state; else to the one before
};

struct Decoder {
    const Layer* layers;
    Product head;
    Norm embedding_norm, final_norm;
    const float* embeddings;  // [V, H]; null: rows of the table
    const Product* table;     // packed; null: the head
    const Joined* joined;     // null: a layer begins with hidden states
    int64_t num_layers, hidden_size, num_embeddings;
    double embedding_scale;
};

// Cosines and sines of every position, [positions, turned], and by what queries are multiplied then, [positions]; null: by nothing.
struct Angles {
    const float *cosines, *sines, *query_scales;
    int64_t num_turned;
};

typedef int64_t (*Attend)(const void* call);

enum Part { EMBEDDINGS, NORMS, QKV, ATTENTION, OUT, ROUTER, EXPERTS, GATE_UP, DOWN, HEAD, NUM_PARTS };

struct Pass {
    const int64_t *token_ids, *positions, *kept;  // [T], [T], ascending indices [L]
    const Angles* angles;
    const char* calls;                            // of attention, one for each layer
    Attend attend;
    float *hidden, *normed, *aside;                    // [T, H]
    float *qkv, *attended, *gated, *wide, *logits;     // [T, W], [T, H D], [T, I], [T, 2 I], [L, V]
    float* mixed;          // [T, H] of experts, then [T]
    void* mixing;          // see Mixing
    float* joined;         // [T, 2 H]; hidden has what a head begins with
    uint8_t* bytes;        // [T, widest], of rows that are quantised
    float* scratch;        // of each thread
    double* seconds;       // CPU time of the first thread, added by part; null: not measured
    float* told;                // [T, num_told, H]: what some layers begin with, or the last one gives
    const int64_t* told_layers; // which, ascending; num_layers: what the last one gives
    int64_t num_told;
    int64_t num_tokens, num_kept, call_bytes, scratch_floats, num_threads;
};

// Greedy continuations: of each sequence the newest token, which every step replaces. Sequences that have all theirs make room: the arrays of
// the others move together.
struct Guesses {
    const int32_t* tables;                 // block tables [rows, table_stride]
    int32_t *rows, *starts, *counts;       // row of each sequence, where its newest token will stand, guesses that it gets, at least 1 [B]
    int64_t *columns, *slots, *token_ids, *positions;  // its column of tokens; of its newest token [B]; attention and pass read the last three
    int32_t* tokens;                       // all guesses [most counts, B]; what is not guessed stays as it is
    const uint8_t* closed;                 // tokens that are never chosen [V]; null: none
    int64_t table_stride, block_size, num_sequences, vocab_size;
    int64_t sequences_at, tokens_at;       // bytes from the start of a call of attention to its numbers
    double min_probability;                // a guess with less is none, and ends its sequence's
    double scale, softcap;                 // what logits are multiplied by before they are probabilities, and bounded by; 0: by nothing
};

// Drafts of a head, which attend to a text in the cache and to the drafts before. Sequences that have all theirs make room, as in Guesses.
struct Drafts {
    const float *keys, *values;            // of texts [blocks, block_size, KV, D]
    const int32_t* tables;                 // block tables [rows, table_stride]
    int32_t *rows, *lengths, *counts;      // row of each sequence, tokens of its text that it attends to, drafts that it gets [B]
    float *draft_keys, *draft_values;      // [most counts, B, KV, D]
    int64_t *columns, *token_ids, *positions;  // its column of drafts, its newest token [B]; the pass reads the last two
    int32_t* tokens;                       // all drafts [most counts, B]; what is not drafted stays as it is
    const int64_t* target_ids;             // token of each draft token; null: the same number
    const float* qkv;                      // of the pass, like attended
    float* attended;
    int64_t table_stride, block_size, num_sequences, num_heads, num_kv_heads, head_dim;
    int64_t count, step;                   // sequences that are left, drafts before
    double min_probability;                // a draft with less is none, and ends its sequence's
};

// Tokens of a model's pass that a head reads. The pass leaves its hidden states in `hidden`.
struct Followed {
    const float* states;     // of the model [T, states.num_inputs]
    const int64_t* slots;    // where keys and values go [T]
    float *keys, *values;    // of the cache [slots, KV, D]
};

int64_t widest_input(const Decoder& d) {
    int64_t widest = d.hidden_size;
    if (d.joined && d.joined->states.num_inputs > widest) widest = d.joined->states.num_inputs;
    for (int64_t i = 0; i < d.num_layers; ++i)
        for (int64_t inputs : {d.layers[i].qkv.num_inputs, d.layers[i].out.num_inputs, d.layers[i].down.num_inputs})
            widest = inputs > widest ? inputs : widest;
    return whole(widest, 16);
}

// Bytes of the widest row that is quantised; 0: none is.
int64_t widest_bytes(const Decoder& d) {
    int64_t widest = row_bytes(d.head);
    if (d.joined && row_bytes(d.joined->states) > widest) widest = row_bytes(d.joined->states);
    for (int64_t i = 0; i < d.num_layers; ++i)
        for (const Product* w : {&d.layers[i].qkv, &d.layers[i].out, &d.layers[i].gate_up, &d.layers[i].down})
            widest = row_bytes(*w) > widest ? row_bytes(*w) : widest;
    return widest;
}

int64_t scratch_floats(const Decoder& d) { return FEW * (widest_input(d) + widest_bytes(d) / 4) + 2 * TILE; }

bool is_aligned(const Product& gate_up) { return gate_up.num_outputs / 2 % PANEL == 0; }

// What one thread of the team does; all do the same, and share the loops.
class Member {
   public:
    Member(const Decoder& decoder, const Pass& pass, int64_t thread)
        : d(decoder), p(pass), rows(pass.num_tokens), hidden(pass.hidden), normed(pass.normed) {
        own_rows = p.scratch + thread * p.scratch_floats;
        tiles = own_rows + FEW * widest_input(d);
        own_bytes = reinterpret_cast<uint8_t*>(tiles + 2 * TILE);
        timed = thread == 0 && p.seconds;
        if (timed) since = now();
    }

    int64_t run() {
        int64_t failed = 0;
        const bool tells_end = p.num_told && p.told_layers[p.num_told - 1] == d.num_layers;
        embed();
        for (int64_t i = 0; i < d.num_layers; ++i) {
            const Layer& layer = d.layers[i];
            tell(i);
            heads(layer);
            failed |= p.attend(p.calls + i * p.call_bytes);
            mark(ATTENTION);
            const float* attended = p.attended;
            if (i + 1 == d.num_layers && p.num_kept < p.num_tokens && !tells_end) attended = keep(layer);
            float* const first = layer.order == SEQUENTIAL ? hidden : p.aside;
            float* const second = layer.order == PARALLEL_FIRST ? p.aside : hidden;
            project(layer.out, input(attended, layer.out.num_inputs, layer.out), layer.attended_norm, layer.attended_scale, first,
                    first == hidden);
            mark(OUT);
            if (layer.mixture.num_experts) mix(layer);
            if (layer.gate_up.num_outputs) gates(layer);
            if (layer.order == PARALLEL) add_aside();
            if (layer.mixture.num_experts) add_mixed(layer, second);
            else
                project(layer.down, input(p.gated, layer.down.num_inputs, layer.down), layer.projected_norm, layer.projected_scale,
                        second, true);
            if (layer.order == PARALLEL_FIRST) add_aside();
            mark(DOWN);
        }
        if (tells_end) {
            tell(d.num_layers);
            keep();
        }
        const Input last = input(hidden, d.hidden_size, d.head, d.final_norm);
        multiply(d.head, last, Linear{d.head.bias, p.logits, d.head.num_outputs, d.head.num_outputs, d.head.num_inputs});
        mark(HEAD);
        return failed;
    }

    void follow(const Followed& f) {
        const Product& w = d.joined->states;
        multiply(w, input(f.states, w.num_inputs, w), Linear{w.bias, hidden, w.num_outputs, w.num_outputs, w.num_inputs});
        embed();
        const Layer& layer = d.layers[0];
        heads(layer);
        const int64_t size = layer.num_kv_heads * layer.head_dim, before = layer.num_heads * layer.head_dim;
#pragma omp for schedule(static)
        for (int64_t m = 0; m < rows; ++m) {
            const float* const made = p.qkv + m * layer.qkv.num_outputs + before;
            std::memcpy(f.keys + f.slots[m] * size, made, static_cast<size_t>(size) * sizeof(float));
            std::memcpy(f.values + f.slots[m] * size, made + size, static_cast<size_t>(size) * sizeof(float));
        }
    }

   private:
    const Decoder& d;
    const Pass& p;
    int64_t rows;
    float *hidden, *normed;  // change places when rows become fewer
    float *own_rows, *tiles;
    uint8_t* own_bytes;
    bool timed;
    double since = 0.0;
    [[maybe_unused]] Tiles held{};

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

    // Hidden states of all tokens before a layer, if they are asked for.
    void tell(int64_t layer) {
        for (int64_t j = 0; j < p.num_told; ++j) {
            if (p.told_layers[j] != layer) continue;
#pragma omp for schedule(static)
            for (int64_t m = 0; m < rows; ++m)
                std::memcpy(p.told + (m * p.num_told + j) * d.hidden_size, hidden + m * d.hidden_size,
                            static_cast<size_t>(d.hidden_size) * sizeof(float));
        }
    }

    void embed() {
        const int64_t size = d.hidden_size;
#pragma omp for schedule(static)
        for (int64_t m = 0; m < rows; ++m) {
            float* const row = hidden + m * size;
            if (!d.joined) {
                embed(p.token_ids[m], d.embedding_norm, row);
                continue;
            }
            float* const both = p.joined + 2 * m * size;
            embed(p.token_ids[m], d.joined->embedding_norm, both);
            apply(d.joined->hidden_norm, row, size, both + size);
            if (d.joined->keeps_normed) std::memcpy(row, both + size, static_cast<size_t>(size) * sizeof(float));
        }
        mark(EMBEDDINGS);
    }

    void embed(int64_t id, const Norm& norm, float* row) const {
        const float scale = static_cast<float>(d.embedding_scale);
        if (d.embeddings) {
            for (int64_t k = 0; k < d.hidden_size; ++k) row[k] = d.embeddings[id * d.hidden_size + k] * scale;
        } else {
            read_row(d.table ? *d.table : d.head, id, scale, row);
        }
        if (norm.weight) apply(norm, row, d.hidden_size, row);
    }

    static void apply(const Norm& norm, const float* x, int64_t size, float* out) {
        const float eps = static_cast<float>(norm.eps);
        if (norm.centred) centre_row(x, norm.weight, norm.bias, eps, size, out);
        else norm_row(x, norm.weight, eps, size, out);
    }

    // Queries, keys and values of all tokens.
    void heads(const Layer& layer) {
        const int64_t size = layer.head_dim, stride = layer.qkv.num_outputs, turned = layer.num_heads + layer.num_kv_heads;
        const Input in = d.joined ? input(p.joined, 2 * d.hidden_size, layer.qkv)
                                  : input(hidden, d.hidden_size, layer.qkv, layer.attention_norm);
        const Linear linear{layer.qkv.bias, p.qkv, stride, stride, layer.qkv.num_inputs};
        const Heads found{layer.num_heads, layer.num_kv_heads, size, layer.query_norm, layer.key_norm,
                          static_cast<float>(layer.head_eps), layer.how};
        const auto turn = [&](int64_t row, int64_t first, int64_t last) {
            const Angles angles = layer.angles < 0 ? Angles{} : p.angles[layer.angles];
            const int64_t at = p.positions[row] * angles.num_turned;
            for (int64_t h = first; h < last && h < turned; ++h) {
                found.turn(p.qkv + row * stride, h, angles.cosines + at, angles.sines + at, angles.num_turned);
                if (angles.query_scales && h < layer.num_heads)
                    scale_row(p.qkv + row * stride + h * size, angles.query_scales[p.positions[row]], size);
            }
        };
        if (layer.how & NORMS_WHOLE) {
            multiply(layer.qkv, in, linear);
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; ++row) {
                found.norm_whole(p.qkv + row * stride);
                turn(row, 0, turned);
            }
        } else {
            int64_t panels = 1;  // as many as end where a head does
            while (panels * PANEL % size) ++panels;
            multiply(layer.qkv, in, linear, panels, [&](int64_t first, int64_t last, int64_t row, int64_t end) {
                for (; row < end; ++row) turn(row, first / size, last / size);
            });
        }
        mark(QKV);
    }

    // Only some tokens go on: theirs is copied together. Queries, keys and values have been used, and leave room.
    const float* keep(const Layer& layer) {
        const int64_t size = layer.out.num_inputs;
#pragma omp for schedule(static) nowait
        for (int64_t m = 0; m < p.num_kept; ++m)
            std::memcpy(p.qkv + m * size, p.attended + p.kept[m] * size, static_cast<size_t>(size) * sizeof(float));
        keep();
        return p.qkv;
    }

    void keep() {
        rows = p.num_kept;
#pragma omp for schedule(static)
        for (int64_t m = 0; m < rows; ++m) {
            std::memcpy(normed + m * d.hidden_size, hidden + p.kept[m] * d.hidden_size,
                        static_cast<size_t>(d.hidden_size) * sizeof(float));
        }
        float* const other = hidden;
        hidden = normed;
        normed = other;
    }

    void gates(const Layer& layer) {
        const Product& w = layer.gate_up;
        const Input in = input(hidden, d.hidden_size, w, layer.mlp_norm);
        if (!layer.gated) {
            multiply(w, in, Linear{w.bias, p.gated, w.num_outputs, w.num_outputs, w.num_inputs}, 1,
                     [&](int64_t first, int64_t last, int64_t row, int64_t end) {
                         for (; row < end; ++row) {
                             float* const made = p.gated + row * w.num_outputs + first;
                             activate_row(made, last - first, layer.activation, made);
                         }
                     });
            mark(GATE_UP);
            return;
        }
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
        const int64_t some = rows < TILE_ROWS ? rows : TILE_ROWS, room = TILE_ROWS / (some ? some : 1), most = in_piece(w, size / PANEL, 1);
        const int64_t panels = most < room ? most : room, width = panels * PANEL, count = (size + width - 1) / width;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < count * blocks; ++i) {
            const int64_t first = i % count * width, last = first + width < size ? first + width : size;
            const int64_t row = block(i / count), end = block(i / count + 1), step = TILE_ROWS / panels;
            for (int64_t m = row; m < end; m += step) gate(layer, in, m, m + step < end ? m + step : end, first, last);
        }
        mark(GATE_UP);
    }

    // Some rows' activated gates times values, for some panels of each.
    void gate(const Layer& layer, const Input& in, int64_t row, int64_t end, int64_t first, int64_t last) {
        const Product& w = layer.gate_up;
        const int64_t size = w.num_outputs / 2, width = last - first;
        float* const values = tiles + TILE;
        const Linear left{w.bias, tiles, width, w.num_outputs, w.num_inputs, false, row, first};
        const Linear right{w.bias, values, width, w.num_outputs, w.num_inputs, false, row, first + size};
        for (int64_t output = first; output < last; output += PANEL) panel(w, in, left, row, end, output);
        for (int64_t output = first; output < last; output += PANEL) panel(w, in, right, row, end, output + size);
        for (int64_t m = 0; m < end - row; ++m)
            gate_row(tiles + m * width, values + m * width, width, layer.activation, p.gated + (row + m) * size + first);
    }

    // What the experts of a layer make of all rows, and logits of the gates of what is beside them.
    void mix(const Layer& layer) {
        const Mixture& m = layer.mixture;
        const float* x = hidden;
        if (layer.mlp_norm.weight) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; ++row)
                apply(layer.mlp_norm, hidden + row * d.hidden_size, d.hidden_size, normed + row * d.hidden_size);
            x = normed;
            mark(NORMS);
        }
        if (m.beside.num_outputs) multiply(m.beside, Input{x, nullptr}, Linear{m.beside.bias, p.mixed + rows * d.hidden_size, 1, 1, d.hidden_size});
        const Mixing at(m, rows, p.mixing);
        for (int64_t row = 0; row < rows; row += MIXED_ROWS) {
            const int64_t count = row + MIXED_ROWS < rows ? MIXED_ROWS : rows - row;
            const float* some = x + row * d.hidden_size;
            route(m, at, some, count);
            mix_rows(m, at, some, at.experts, at.weights, count, tiles, p.mixed + row * d.hidden_size);
        }
        mark(EXPERTS);
    }

    void route(const Mixture& m, const Mixing& at, const float* x, int64_t count) {
        const Linear linear{m.router.bias, at.logits, m.num_experts, m.num_experts, m.router.num_inputs};
#pragma omp for schedule(static)
        for (int64_t first = 0; first < m.num_experts; first += PANEL)
            panel(m.router, Input{x, nullptr}, linear, 0, count, first);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < count; ++row)
            route_row(m, at.logits + row * m.num_experts, at.experts + row * m.num_chosen, at.weights + row * m.num_chosen);
        mark(ROUTER);
    }

    // Add to hidden states what experts, and the MLP beside them, have made.
    void add_mixed(const Layer& layer, float* to) {
        const int64_t size = d.hidden_size;
        const bool is_beside = layer.down.num_outputs;
        if (is_beside)
            multiply(layer.down, input(p.gated, layer.down.num_inputs, layer.down),
                     Linear{layer.down.bias, p.wide, size, size, layer.down.num_inputs});
#pragma omp for schedule(static)
        for (int64_t m = 0; m < rows; ++m) {
            float* const row = p.mixed + m * size;
            const float* gate = layer.mixture.beside.num_outputs ? p.mixed + rows * size + m : nullptr;
            if (is_beside) add_beside(p.wide + m * size, gate, size, row);
            end_row(row, layer.projected_norm, layer.projected_scale, to + m * size, true);
        }
    }

    // Write a product, or add it to what is there; where it is normed or scaled before, by way of `wide`.
    void project(const Product& w, const Input& in, const Norm& norm, double scale, float* to, bool adds) {
        const int64_t size = d.hidden_size;
        if (!norm.weight && scale == 1.0) {
            multiply(w, in, Linear{w.bias, to, size, w.num_outputs, w.num_inputs, adds});
            return;
        }
        multiply(w, in, Linear{w.bias, p.wide, size, w.num_outputs, w.num_inputs});
#pragma omp for schedule(static)
        for (int64_t m = 0; m < rows; ++m) end_row(p.wide + m * size, norm, scale, to + m * size, adds);
    }

    // Norm and scale what a part of a layer has made of a row, and write or add it.
    void end_row(float* row, const Norm& norm, double scale, float* to, bool adds) const {
        if (norm.weight) apply(norm, row, d.hidden_size, row);
        if (scale != 1.0) scale_row(row, static_cast<float>(scale), d.hidden_size);
        for (int64_t k = 0; k < d.hidden_size; ++k) to[k] = adds ? to[k] + row[k] : row[k];
    }

    void add_aside() {
#pragma omp for schedule(static)
        for (int64_t m = 0; m < rows; ++m)
            for (int64_t k = m * d.hidden_size; k < (m + 1) * d.hidden_size; ++k) hidden[k] += p.aside[k];
    }

    // What goes into a product: rows, normed where a norm is given, quantised where the weights are.
    Input input(const float* x, int64_t size, const Product& w, const Norm& norm = Norm{}) {
        const int64_t bytes = row_bytes(w);
        if (!norm.weight && !bytes) return {x, nullptr};
        if (rows <= FEW) {
            for (int64_t m = 0; m < rows; ++m) prepare(x + m * size, w, norm, own_rows + m * size, own_bytes + m * bytes);
            if (norm.weight) mark(NORMS);
            return {own_rows, own_bytes};
        }
#pragma omp for schedule(static)
        for (int64_t m = 0; m < rows; ++m) prepare(x + m * size, w, norm, bytes ? own_rows : normed + m * size, p.bytes + m * bytes);
        if (norm.weight) mark(NORMS);
        return {normed, p.bytes};
    }

    static void prepare(const float* x, const Product& w, const Norm& norm, float* row, uint8_t* bytes) {
        if (norm.weight) apply(norm, x, w.num_inputs, row);
        if (is_rounded(w)) round_row(w, norm.weight ? row : x, bytes);
    }

    int64_t num_blocks() const { return (rows + ROW_BLOCK - 1) / ROW_BLOCK; }
    int64_t block(int64_t i) const { return rows * i / (num_blocks() ? num_blocks() : 1); }

    // How many times so many panels make one piece of work, where a product has `count` of them.
    int64_t in_piece(const Product& w, int64_t count, int64_t panels) const {
        const int64_t runs = (rows + MOST_ROWS - 1) / MOST_ROWS;
        const int64_t by_bytes = PIECE_BYTES / (runs * panels * panel_bytes(w) + 1), by_threads = count / (p.num_threads * PIECES_EACH);
        const int64_t most = by_bytes < by_threads ? by_bytes : by_threads;
        return most > 1 ? most : 1;
    }

    void multiply(const Product& w, const Input& in, const Linear& layer) {
        multiply(w, in, layer, 1, [](int64_t, int64_t, int64_t, int64_t) {});
    }

    // A product of all rows; `after` each piece of some panels, its thread goes on with the outputs and rows it has made.
    template <typename After>
    void multiply(const Product& w, const Input& in, const Linear& layer, int64_t panels, const After& after) {
        const int64_t blocks = num_blocks(), each = panels * PANEL;
        const int64_t width = each * in_piece(w, w.num_outputs / each, panels), count = (w.num_outputs + width - 1) / width;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < count * blocks; ++i) {
            const int64_t first = i % count * width, row = block(i / count), end = block(i / count + 1);
            const int64_t last = first + width < w.num_outputs ? first + width : w.num_outputs;
            for (int64_t output = first; output < last; output += PANEL)
                panel(w, in, layer, row, end, output);
            after(first, last, row, end);
        }
    }

    // Some rows' outputs of one panel.
    void panel(const Product& w, const Input& in, const Linear& layer, int64_t row, int64_t end, int64_t first) const {
        multiply_panel(w, layer, in, w.num_inputs, row, end, first);
    }
};

// A token whose logit is the largest, the lowest of equal ones, and its probability.
struct Choice {
    int64_t token;
    float probability;
};

// Choose from logits that are not closed; those that are closed are overwritten.
Choice likeliest(float* logits, int64_t size, const uint8_t* closed, float scale, float softcap) {
    for (int64_t k = 0; closed && k < size; ++k)
        if (closed[k]) logits[k] = -INFINITY;
    Floats peaks = Floats{} - INFINITY;
    int64_t k = 0;
    for (; k + LANES <= size; k += LANES) {
        const Floats some = load(logits + k);
        peaks = some > peaks ? some : peaks;
    }
    float peak = -INFINITY;
    for (int64_t lane = 0; lane < LANES; ++lane) peak = peaks[lane] > peak ? peaks[lane] : peak;
    for (; k < size; ++k) peak = logits[k] > peak ? logits[k] : peak;
    int64_t token = 0;
    while (token < size && logits[token] != peak) ++token;
    if (token == size) return {0, 0.0f};  // no number among them
    // As cap * tanh(x / cap), and tanh(x) = 1 - 2 / (exp(2 x) + 1).
    const auto value = [=](Floats x) {
        x *= scale;
        return softcap > 0.0f ? softcap - 2.0f * softcap / (exp_of(2.0f / softcap * x) + 1.0f) : x;
    };
    const float top = value(Floats{} + peak)[0];
    Floats sums{};
    for (k = 0; k + LANES <= size; k += LANES) sums += exp_of(value(load(logits + k)) - top);
    float sum = 0.0f;
    for (int64_t lane = 0; lane < LANES; ++lane) sum += sums[lane];
    for (; k < size; ++k) sum += exp_of(value(Floats{} + logits[k]) - top)[0];
    return {token, 1.0f / sum};
}

// Choose a guess for each of some sequences, and return how many get another one; they come first.
int64_t choose(const Guesses& g, float* logits, int64_t count, int64_t step, float scale, float softcap) {
    for (int64_t i = 0; i < count; ++i) {
        const Choice choice = likeliest(logits + i * g.vocab_size, g.vocab_size, g.closed, scale, softcap);
        if (choice.probability < g.min_probability) {
            g.counts[i] = 0;
            continue;
        }
        g.token_ids[i] = choice.token;
        g.tokens[step * g.num_sequences + g.columns[i]] = static_cast<int32_t>(choice.token);
    }
    for (int64_t i = count - 1; i >= 0; --i) {
        if (g.counts[i] > step + 1) continue;
        --count;
        g.rows[i] = g.rows[count], g.starts[i] = g.starts[count], g.counts[i] = g.counts[count];
        g.columns[i] = g.columns[count], g.token_ids[i] = g.token_ids[count];
    }
    return count;
}

constexpr int64_t SEEN = 64;  // keys that are weighed together

float dot(const float* x, const float* y, int64_t size) {
    Floats sums = {};
    int64_t k = 0;
    for (; k + LANES <= size; k += LANES) sums += load(x + k) * load(y + k);
    float total = 0.0f;
    for (int i = 0; i < LANES; ++i) total += sums[i];
    for (; k < size; ++k) total += x[k] * y[k];
    return total;
}

// A softmax over keys that come some at a time. Source: Milakov and Gimelshein, arXiv:1805.02867.
struct Weighing {
    const float* query;
    float* out;  // [D], zeros at first
    int64_t size, stride;
    float factor, best = -INFINITY, total = 0.0f;

    // Keys and values `stride` floats apart, at most SEEN of them.
    void add(const float* keys, const float* values, int64_t count) {
        float scores[SEEN];
        float most = best;
        for (int64_t i = 0; i < count; ++i) {
            scores[i] = dot(query, keys + i * stride, size) * factor;
            most = scores[i] > most ? scores[i] : most;
        }
        const float kept = std::exp(best - most);
        total *= kept;
        scale_row(out, kept, size);
        for (int64_t i = 0; i < count; ++i) {
            const float weight = std::exp(scores[i] - most);
            total += weight;
            for (int64_t k = 0; k < size; ++k) out[k] += weight * values[i * stride + k];
        }
        best = most;
    }
};

// Attention's output of one query head of a sequence.
void attend_draft(const Drafts& a, int64_t sequence, int64_t head) {
    const int64_t size = a.head_dim, all = (a.num_heads + 2 * a.num_kv_heads) * size;
    const int64_t kv_head = head / (a.num_heads / a.num_kv_heads), stride = a.num_kv_heads * size;
    float* const out = a.attended + (sequence * a.num_heads + head) * size;
    std::memset(out, 0, static_cast<size_t>(size) * sizeof(float));
    Weighing found{a.qkv + sequence * all + head * size, out, size, stride, 1.0f / std::sqrt(static_cast<float>(size))};
    const int32_t* const blocks = a.tables + a.rows[sequence] * a.table_stride;
    for (int64_t at = 0, count; at < a.lengths[sequence]; at += count) {
        const int64_t within = at % a.block_size, left = a.lengths[sequence] - at;
        count = a.block_size - within < SEEN ? a.block_size - within : SEEN;
        count = count < left ? count : left;
        const int64_t place = (blocks[at / a.block_size] * a.block_size + within) * stride + kv_head * size;
        found.add(a.keys + place, a.values + place, count);
    }
    for (int64_t i = 0; i < a.step; ++i) {
        const int64_t place = (i * a.num_sequences + a.columns[sequence]) * stride + kv_head * size;
        found.add(a.draft_keys + place, a.draft_values + place, 1);
    }
    scale_row(out, 1.0f / found.total, size);
}

// Attention of a head's pass, called as that over the cache is: by every thread of a team.
int64_t attend_drafts(const void* call) {
    const Drafts& a = *static_cast<const Drafts*>(call);
    const int64_t size = a.num_kv_heads * a.head_dim, all = a.num_heads * a.head_dim + 2 * size;
    // The first one's keys and values are in the cache.
#pragma omp for schedule(static)
    for (int64_t m = 0; m < (a.step ? a.count : 0); ++m) {
        const int64_t place = ((a.step - 1) * a.num_sequences + a.columns[m]) * size;
        const float* const made = a.qkv + m * all + a.num_heads * a.head_dim;
        std::memcpy(a.draft_keys + place, made, static_cast<size_t>(size) * sizeof(float));
        std::memcpy(a.draft_values + place, made + size, static_cast<size_t>(size) * sizeof(float));
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < a.count * a.num_heads; ++i) attend_draft(a, i / a.num_heads, i % a.num_heads);
    return 0;
}

// Choose a draft for each of the sequences that are left; those that get another one come first.
void choose(Drafts& a, int64_t hidden_size, int64_t vocab_size, const Pass& pass) {
    for (int64_t i = 0; i < a.count; ++i) {
        const Choice choice = likeliest(pass.logits + i * vocab_size, vocab_size, nullptr, 1.0f, 0.0f);
        if (choice.probability < a.min_probability) {
            a.counts[i] = 0;
            continue;
        }
        a.token_ids[i] = a.target_ids ? a.target_ids[choice.token] : choice.token;
        a.tokens[a.step * a.num_sequences + a.columns[i]] = static_cast<int32_t>(a.token_ids[i]);
        ++a.positions[i];
    }
    for (int64_t i = a.count - 1; i >= 0; --i) {
        if (a.counts[i] > a.step + 1) continue;
        const int64_t last = --a.count;
        a.rows[i] = a.rows[last], a.lengths[i] = a.lengths[last], a.counts[i] = a.counts[last];
        a.columns[i] = a.columns[last], a.token_ids[i] = a.token_ids[last], a.positions[i] = a.positions[last];
        std::memmove(pass.hidden + i * hidden_size, pass.hidden + last * hidden_size,
                     static_cast<size_t>(hidden_size) * sizeof(float));
    }
}

// Have every thread of a team do its part of a pass. Returns as trencadis_decode.
template <typename Part>
int64_t in_team(const Decoder& decoder, const Pass& pass, const Part& part) {
    for (int64_t m = 0; m < pass.num_tokens; ++m)
        if (pass.token_ids[m] < 0 || pass.token_ids[m] >= decoder.num_embeddings) return 2;
    int64_t failed = 0;
#pragma omp parallel num_threads(static_cast<int>(pass.num_threads)) if (pass.num_threads > 1) reduction(| : failed)
    {
#ifdef _OPENMP
        const int64_t thread = omp_get_thread_num();
#else
        const int64_t thread = 0;
#endif
        Member member(decoder, pass, thread);
        failed |= part(member);
    }
    return failed ? 1 : 0;
}

}  // namespace

extern "C" {

// Bytes of the structures that the caller makes.
int64_t trencadis_decoder_bytes() { return sizeof(Decoder) + sizeof(Layer) + sizeof(Pass) + sizeof(Guesses) + sizeof(Joined) + sizeof(Drafts) + sizeof(Followed); }

int64_t trencadis_decoder_parts() { return NUM_PARTS; }

// Bytes of the widest row that is quantised, and floats of one thread's scratch.
int64_t trencadis_decoder_widest(const Decoder* decoder) { return widest_bytes(*decoder); }
int64_t trencadis_decoder_scratch(const Decoder* decoder) { return scratch_floats(*decoder); }

// Bytes that mixtures of experts need for a pass of so many tokens.
int64_t trencadis_decoder_mixing(const Decoder* decoder, int64_t num_tokens) {
    int64_t most = 0;
    for (int64_t i = 0; i < decoder->num_layers; ++i) {
        const Mixture& m = decoder->layers[i].mixture;
        const int64_t bytes = m.num_experts ? mixing_bytes(m, num_tokens) : 0;
        most = bytes > most ? bytes : most;
    }
    return most;
}

// Write the logits of the kept tokens, and keys and values of all. Returns 0; 1 if attention found no memory; 2 if a token has no
// embedding.
int64_t trencadis_decode(const Decoder* decoder, const Pass* pass) {
    return in_team(*decoder, *pass, [](Member& member) { return member.run(); });
}

// Write a head's hidden states of a pass's tokens, and its keys and values. Returns as trencadis_decode.
int64_t trencadis_follow(const Decoder* decoder, const Pass* pass, const Followed* f) {
    return in_team(*decoder, *pass, [f](Member& member) {
        member.follow(*f);
        return 0;
    });
}

// Guess until every sequence has its own number, or one is too unlikely, from the logits [B, V] that the pass has; they are overwritten.
// Writes keys and values of all guesses but the last of each. Returns as trencadis_decode.
int64_t trencadis_guess(const Decoder* decoder, Pass* pass, const Guesses* g) {
    int64_t count = choose(*g, pass->logits, g->num_sequences, 0, 1.0f, 0.0f);
    for (int64_t step = 1; count > 0; ++step) {
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
        for (int64_t i = 0; i < count; ++i) ++g->starts[i];
        count = choose(*g, pass->logits, count, step, static_cast<float>(g->scale), static_cast<float>(g->softcap));
    }
    return 0;
}

// Drafts of a head, one token of each sequence at a time until every one has its number, or one is too unlikely. The pass begins with the hidden states that the
// head reads first, and takes its attention from here. Returns as trencadis_decode.
int64_t trencadis_draft(const Decoder* decoder, Pass* pass, Drafts* a) {
    pass->attend = attend_drafts;
    pass->calls = reinterpret_cast<const char*>(a);
    a->count = a->num_sequences;
    for (a->step = 0; a->count > 0; ++a->step) {
        pass->num_tokens = pass->num_kept = a->count;
        const int64_t failed = trencadis_decode(decoder, pass);
        if (failed) return failed;
        choose(*a, decoder->hidden_size, decoder->head.num_outputs, *pass);
    }
    return 0;
}

}  // extern "C"
