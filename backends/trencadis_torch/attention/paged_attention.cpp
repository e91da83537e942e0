// Attention over a paged KV cache on a CPU: decode, chunks of prompts, whole prompts and drafts, all in one way.
//
//     write    new keys and values go to their slots                                                      attention_layer.h
//     rows     the queries of one sequence that share a KV head: query i, head g of the group are row i * groups + g
//     item     up to ROWS rows × some KV heads × some spans of keys; threads take items as they come
//     tile     TILE keys: scores ▶ online softmax ▶ weighted values                                       attention_softmax.h
//              few rows read memory in its own order, and nothing is transposed but sums                  attention_few_rows.h
//              many rows share keys that are transposed once, in matrix products                          attention_many_rows.h
//     span     SPAN keys have a softmax of their own; spans are merged in the order of their keys
//
// Tiles and spans lie at fixed positions, and the order of every sum follows from the sequence alone. So a row has the same bits
// whatever shares its batch, and however many threads there are. No allocation once buffers have grown.

#include <cstdlib>
#include <new>
#include <vector>

#include "attention_few_rows.h"
#include "attention_many_rows.h"

namespace {

constexpr int64_t ITEMS_PER_THREAD = 4;

class Buffer {  // grows, and is kept
 public:
  Buffer() = default;
  Buffer(const Buffer &) = delete;
  ~Buffer() { std::free(data_); }
  float *take(int64_t floats) {  // null: no memory
    if (floats > size_) {
      std::free(data_);
      size_ = 0;
      data_ = static_cast<float *>(std::aligned_alloc(64, (size_t(floats) * 4 + 63) / 64 * 64));
      size_ = data_ ? floats : 0;
    }
    return data_;
  }

 private:
  float *data_ = nullptr;
  int64_t size_ = 0;
};

struct Plan {
  std::vector<Item> items, parts;
  Buffer states;
};

thread_local Buffer scratch;
thread_local Plan plan_;  // of the thread that made it; read by its team until the call ends

template <class Cache> class Attention {
 public:
  explicit Attention(const Call &call) : c(call), l(call) {}

  // All threads of a team call it, with the same call; false in one that found no memory. One of them plans for all.
  bool run() const {
#pragma omp for schedule(static) nowait
    for (int64_t token = 0; token < c.num_tokens; token++) l.write(token);
    const Plan *plan;
#pragma omp single copyprivate(plan)
    plan = make_plan();
    if (!plan) return false;
    const std::vector<Item> &items = plan->items, &parts = plan->parts.empty() ? items : plan->parts;
    const int64_t count = int64_t(parts.size()), gathered = plan->parts.empty() ? 0 : int64_t(items.size());
    float *mine = scratch.take(scratch_floats());
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; i++)
      if (mine) attend(parts[size_t(i)], i + c.num_threads < count ? &parts[size_t(i + c.num_threads)] : nullptr, mine);
    if (gathered) {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < gathered; i++)
        if (mine) gather(items[size_t(i)], mine);
    }
    return mine != nullptr;
  }

  bool is_small() const {  // waiting for another thread costs more than a few microseconds of work
    int64_t work = 0;
    for (int64_t s = 0; s < c.num_sequences; s++) {
      int64_t before = c.window && c.window < c.starts[s] ? c.window : c.starts[s];
      work += (before + c.query_lens[s]) * (16 + c.query_lens[s] * l.groups);
    }
    return work * c.num_kv_heads * (c.key_dim + c.value_dim) < 1 << 19;
  }

 private:
  const Call &c;
  const Layer<Cache> l;

  int64_t state_floats(const Item &item) const { return item.num_heads * item.num_rows * (l.padded + LANES); }
  int64_t scratch_floats() const {
    return ROWS * (l.query_stride + 2 * (l.padded + LANES) + TILE + LANES * PARTS) + TILE * (c.key_dim + l.padded);
  }

  const Plan *make_plan() const {
    try {
      fill(plan_);
      return &plan_;
    } catch (const std::bad_alloc &) {
      return nullptr;
    }
  }

  // Items are the largest pieces of work that keep all threads busy; there are parts too, if spans must be shared out for that.
  void fill(Plan &plan) const {
    int64_t wanted = c.num_threads > 1 ? ITEMS_PER_THREAD * c.num_threads : 1, spans = 0;
    plan.parts.clear();
    for (int64_t heads = ROWS;; heads = (heads + 1) / 2) {
      spans = list_items(heads, plan.items);
      if (int64_t(plan.items.size()) >= wanted || spans >= wanted || heads == 1) break;
    }
    if (int64_t(plan.items.size()) >= wanted || spans == int64_t(plan.items.size())) return;
    int64_t floats = 0;
    for (const Item &item : plan.items) floats += item.num_spans * state_floats(item);
    float *states = plan.states.take(floats);
    if (!states) throw std::bad_alloc();
    for (Item &item : plan.items) {
      item.states = states;
      for (int64_t i = 0; i < item.num_spans; i++, states += state_floats(item))
        plan.parts.push_back({item.sequence, item.row, item.num_rows, item.head, item.num_heads, item.span + i, 1, states});
    }
  }

  int64_t list_items(int64_t most_heads, std::vector<Item> &items) const {
    int64_t spans = 0;
    items.clear();
    for (int64_t s = 0; s < c.num_sequences; s++) {
      const int64_t rows = c.query_lens[s] * l.groups, rest = rows % ROWS;
      for (int64_t head = 0; head < c.num_kv_heads; head++)  // those of one head behind each other: its keys are in the cache
        for (int64_t row = 0; row < rows - rest; row += ROWS) spans += push_item({s, row, ROWS, head, 1, 0, 0, nullptr}, items);
      int64_t heads = rest ? ROWS / rest : 1;
      if (heads > most_heads) heads = most_heads;
      for (int64_t head = 0; rest && head < c.num_kv_heads; head += heads) {
        const int64_t left = c.num_kv_heads - head;
        spans += push_item({s, rows - rest, rest, head, left < heads ? left : heads, 0, 0, nullptr}, items);
      }
    }
    return spans;
  }

  int64_t push_item(Item item, std::vector<Item> &items) const {
    item.span = l.begin(item) / SPAN;
    item.num_spans = (l.end(item) - 1) / SPAN - item.span + 1;
    items.push_back(item);
    return item.num_spans;
  }

  // next: the item that is probably taken afterwards, or null.
  void attend(const Item &item, const Item *next, float *mine) const {
    float *queries = mine, *states = queries + ROWS * l.query_stride, *merged = states + ROWS * (l.padded + LANES);
    float *rest = merged + ROWS * (l.padded + LANES);
    l.load_queries(item, queries);
    States part{item.states ? item.states : states, l.padded}, all{merged, l.padded};
    if (item.num_rows <= FEW_ROWS) {
      FewRows<Cache> few(l, item, next);
      add_spans(item, part, all, [&](int64_t span) { few.attend(span, queries, part, rest); });
    } else {
      const ManyRows<Cache> many(l, item, rest);
      add_spans(item, part, all, [&](int64_t span) { many.attend(span, queries, part); });
    }
  }

  template <class Attend> void add_spans(const Item &item, States part, States all, const Attend &attend_span) const {
    const int64_t rows = item.num_heads * item.num_rows;
    for (int64_t i = 0; i < item.num_spans; i++) {
      for (int64_t row = 0; row < rows; row++) part.clear(row);
      attend_span(item.span + i);
      if (item.states) return;
      if (item.num_spans == 1) return l.finish(item, part);
      for (int64_t row = 0; row < rows; row++) {
        if (i == 0) all.clear(row);
        merge(all, part, row);
      }
    }
    l.finish(item, all);
  }

  void gather(const Item &item, float *mine) const {
    States all{mine, l.padded};
    for (int64_t row = 0; row < item.num_heads * item.num_rows; row++) {
      all.clear(row);
      for (int64_t i = 0; i < item.num_spans; i++) merge(all, {item.states + i * state_floats(item), l.padded}, row);
    }
    l.finish(item, all);
  }
};

#ifndef TRENCADIS_FORMATS
#define TRENCADIS_FORMATS 15
#endif

constexpr bool has(int64_t format) { return TRENCADIS_FORMATS >> format & 1; }  // of the cache; each takes seconds to compile

template <class Cache, int64_t FORMAT> int64_t run(const Call &call) {
  if constexpr (has(FORMAT)) return Attention<Cache>(call).run() ? 0 : 1;
  return 2;
}

}  // namespace

extern "C" {

int64_t trencadis_call_bytes() { return sizeof(Call); }

// Queries of a sequence times query heads of a KV head that are computed together.
int64_t trencadis_rows_together() { return ROWS; }

// One layer's attention in a team that there is already: every thread of it calls, with the same call, whose num_threads is the
// team's. Nobody returns before all is done. Returns 0; 1 in a thread that found no memory.
int64_t trencadis_attend_in_team(const Call *call) {
  switch (call->cache_dtype) {
    case FLOAT32: return run<Float32, FLOAT32>(*call);
    case FLOAT16: return run<Float16, FLOAT16>(*call);
    case BFLOAT16: return run<BFloat16, BFLOAT16>(*call);
    default: return run<Int8, INT8>(*call);
  }
}

// The same with threads of its own. Returns 0; 1 if there is no memory; 2 if it was not compiled for the cache's format.
int64_t trencadis_attend(const Call *call) {
  if (!has(call->cache_dtype)) return 2;
  int threads = Attention<Float32>(*call).is_small() ? 1 : int(call->num_threads);
  int64_t failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(+ : failed)
  failed += trencadis_attend_in_team(call);
  return failed ? 1 : 0;
}
}
