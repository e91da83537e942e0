// Products of linear.cpp for a machine that Python does not run on: jobs from standard input, results to standard output.
//
// A job is int64 numbers, then the arrays that they ask for; a result is what the product and its rows are, float32 [M, N] and [N, K].

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "linear.cpp"

template <typename Element>
std::vector<Element> taken(int64_t count) {
    std::vector<Element> found(count);
    if (count && std::fread(found.data(), sizeof(Element), count, stdin) != static_cast<size_t>(count)) std::exit(2);
    return found;
}

void give(const std::vector<float>& found) {
    if (std::fwrite(found.data(), sizeof(float), found.size(), stdout) != found.size()) std::exit(3);
}

int main() {
    int64_t n[9];
    while (std::fread(n, sizeof(int64_t), 9, stdin) == 9) {
        const int64_t outputs = n[3], inputs = n[4], rows = n[5], groups = outputs * (inputs / n[1]);
        const auto values = taken<uint8_t>(n[6]);
        const auto scales = taken<uint16_t>(n[0] < E4M3 || n[0] == CHANNELS ? 0 : groups);
        const auto minimums = taken<uint16_t>(n[0] >= CHANNELS && n[2] < 0 ? groups : 0);
        auto each = taken<float>(n[0] < E4M3 ? 0 : outputs);
        const auto levels = taken<uint8_t>(n[7]);
        const auto order = taken<int32_t>(n[8]);
        const auto x = taken<float>(rows * inputs);
        each.resize(whole(outputs, PANEL));
        Product w{nullptr, each.data(), nullptr, levels.empty() ? nullptr : levels.data(), order.empty() ? nullptr : order.data(),
                  n[0], n[1], n[2], outputs, inputs};
        std::vector<uint8_t> packed(trencadis_packed_bytes(&w));
        w.weights = packed.data();
        if (n[0] < E4M3) trencadis_pack_floats(&w, values.data(), outputs, 0, packed.data());
        else trencadis_pack_ints(&w, values.data(), scales.empty() ? nullptr : scales.data(),
                                 minimums.empty() ? nullptr : minimums.data(), outputs, 0, packed.data());
        std::vector<float> out(rows * outputs), read(outputs * inputs);
        trencadis_linear(&w, x.data(), rows, inputs, out.data(), outputs, 1);
        std::vector<int64_t> ids(outputs);
        for (int64_t i = 0; i < outputs; ++i) ids[i] = i;
        if (trencadis_rows(&w, ids.data(), outputs, 1.0f, read.data()) >= 0) return 4;
        give(out);
        give(read);
    }
    return 0;
}
