// What slots are worth to a policy that leaves the least worthy out after every row: see Policy in abi.h. Included once per
// instruction set.

struct Worths {
    const Model& model;
    const Segment& segment;
    const Policy& policy;
    int32_t layer;

    int32_t content(int32_t kv_head) const { return int32_t(segment.length(layer, kv_head)); }
    int32_t slots(int32_t kv_head) const { return content(kv_head) + segment.stays + segment.rows; }
    int32_t own_slot(int32_t kv_head, int32_t row) const { return content(kv_head) + segment.stays + row; }
    // After a row of this pass or, counted from the first, one of those that stay.
    double* of(int32_t kv_head, int32_t place) const { return policy.worths + (int64_t(place) * model.kv_heads + kv_head) * policy.worth_slots; }
    float* added(int32_t kv_head, int32_t place) const {
        const int64_t at = int64_t(place) * policy.evicting + policy.places[layer];
        return policy.added + (policy.newest != 0 ? at : at * model.kv_heads + kv_head) * policy.worth_slots;
    }
    const double* held(int32_t kv_head) const { return policy.held + (int64_t(layer) * model.kv_heads + kv_head) * policy.held_slots; }

    // What slots are worth after the rows that stay.
    void recall(int32_t kv_head) const {
        for (int32_t place = 0; place < segment.stays; ++place) {
            const int32_t parent = policy.parents[place], end = content(kv_head);
            const double* known = parent < 0 ? held(kv_head) : of(kv_head, parent);
            const float* more = added(kv_head, place);
            double* worths = of(kv_head, place);
            for (int32_t slot = 0, all = slots(kv_head); slot < all; ++slot) {
                // Its own slot is new, and its parent does not hold it.
                const double before = policy.newest != 0 || slot == end + place ? 0.0 : known[slot];
                worths[slot] = more[slot] < 0.0f ? -1.0 : before + double(more[slot]);
            }
        }
    }
    // The slots that a row reads, its own the last. list: room for them.
    Chosen before(int32_t kv_head, int32_t row, int32_t* list) const {
        const int32_t own = own_slot(kv_head, row), parent = policy.parents[segment.stays + row];
        const double* worths = parent < 0 ? nullptr : of(kv_head, parent);
        int32_t run = parent < 0 ? content(kv_head) : 0, count = 0;
        if (parent >= 0)
            while (run < own && worths[run] >= 0.0) ++run;
        for (int32_t slot = run; parent >= 0 && slot < own; ++slot)
            if (worths[slot] >= 0.0) list[count++] = slot;
        if (run == own) ++run;
        else list[count++] = own;
        return {run, count, list, nullptr};
    }
    // What they are worth after it; sums: of the weights of a group's heads, times paid_unit.
    void after(int32_t kv_head, int32_t row, const Chosen& seen, const int64_t* sums) const {
        const int32_t place = segment.stays + row, parent = policy.parents[place], own = own_slot(kv_head, row), all = slots(kv_head);
        const double *known = parent < 0 ? held(kv_head) : of(kv_head, parent), unit = 1.0 / (double(paid_unit) * (model.heads / model.kv_heads));
        double* worths = of(kv_head, place);
        if (policy.newest != 0) {
            for (int32_t slot = seen.run; slot < all; ++slot) worths[slot] = -1.0;
            for (int32_t i = 0; i < seen.run; ++i) worths[i] = double(sums[i]);
            for (int32_t i = 0; i < seen.count; ++i) worths[seen.list[i]] = double(sums[seen.run + i]);
            return;
        }
        float* more = added(kv_head, place);
        const auto join = [&](int32_t slot, int64_t sum) {
            more[slot] = float(double(sum) * unit);
            worths[slot] = (slot == own ? 0.0 : known[slot]) + double(more[slot]);
        };
        const int32_t straight = seen.run > own ? own : seen.run;
        for (int32_t i = 0; i < straight; ++i) {
            more[i] = float(double(sums[i]) * unit);
            worths[i] = known[i] + double(more[i]);
        }
        for (int32_t slot = straight; slot < all; ++slot) worths[slot] = -1.0, more[slot] = -1.0f;
        if (seen.run > own) join(own, sums[own]);
        for (int32_t i = 0; i < seen.count; ++i) join(seen.list[i], sums[seen.run + i]);
        leave_out(worths, more, all, seen.run + seen.count, row);
    }
    // The same for all heads together, of which each has its own sums.
    void share_out(int32_t row) const {
        const int32_t all = slots(0), place = segment.stays + row;
        const double unit = 1.0 / (double(paid_unit) * model.heads);
        double* first = of(0, place);
        float* more = added(0, place);
        int32_t count = 0;
        for (int32_t slot = 0; slot < all; ++slot) {
            more[slot] = -1.0f;
            if (first[slot] < 0.0) continue;
            for (int32_t head = 1; head < model.kv_heads; ++head) first[slot] += of(head, place)[slot];
            more[slot] = float(first[slot] * unit);
            first[slot] = double(more[slot]);
            ++count;
        }
        leave_out(first, more, all, count, row);
        for (int32_t head = 1; head < model.kv_heads; ++head) __builtin_memcpy(of(head, place), first, size_t(all) * sizeof(double));
    }
    // Leaves out the least worthy of `count` slots until as many are left as may stay.
    void leave_out(double* worths, float* more, int32_t all, int32_t count, int32_t row) const {
        const int64_t at = int64_t(layer) * segment.rows + row;
        for (; count > policy.keeps[at]; --count) {
            double least = __builtin_inf();
            const int32_t last = count - policy.lasts[at];
            int32_t gone = 0;
            for (int32_t slot = 0, i = 0; slot < all; ++slot) {
                if (worths[slot] < 0.0) continue;
                const double worth = i < policy.firsts || i >= last ? __builtin_inf() : worths[slot];
                if (worth <= least) least = worth, gone = slot;
                ++i;
            }
            worths[gone] = -1.0, more[gone] = -1.0f;
        }
    }
};
