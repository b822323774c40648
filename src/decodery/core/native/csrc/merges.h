// What slots that go leave to those that stay: see Policy in abi.h. Included once per instruction set.

// Four numbers in double precision, which every instruction set holds in registers.
typedef double d4 __attribute__((vector_size(32)));
typedef float f4_loose __attribute__((vector_size(16), aligned(4), may_alias));

// A key that others are compared with.
template <class E>
struct Compared {
    double row[most_dim], norm;
    float spread[is_coded<E> ? 4 * most_dim : 16];    // four numbers of the row for each of four slots
    int32_t dim;

    Compared(char* page, int32_t slot, int32_t dim_) : dim(dim_) {
        double square = 0.0;
        each_number<E>(page, 0, slot, dim, [&](int32_t i, const E* held) { row[i] = number(held); });
        for (int32_t i = 0; i < dim; ++i) square += row[i] * row[i];
        norm = length(square);
        for (int32_t i = 0; is_coded<E> && i < 4 * round_up(dim, 4); ++i) {
            const int32_t place = i / 16 * 4 + i % 4;
            spread[i] = place < dim ? float(row[place]) : 0.0f;
        }
    }
    static double number(const float* held) { return double(*held); }
    static double number(const Half* held) {
        float lanes[16];
        store(lanes, load(held, 1));
        return double(lanes[0]);
    }
    // Of codes the integers alone: a scale changes no angle.
    static double number(const Coded* held) { return double(int32_t(uint8_t(held->number)) - 128); }
    static double length(double square) {
        const double root = __builtin_sqrt(square);
        return root > 1e-12 ? root : 1e-12;
    }

    // Cosines with the 16 keys of a page.
    void with(char* page, double* cosines) const {
        double products[page_slots] = {}, squares[page_slots] = {};
        add_up(page, products, squares, E());
        for (int32_t lane = 0; lane < page_slots; ++lane) cosines[lane] = products[lane] / (norm * length(squares[lane]));
    }
    template <class T>
    void add_up(char* page, double* products, double* squares, T) const {
        const T* keys = numbers_of<T>(page, 0, 0);
        d4 with_row[4] = {}, with_itself[4] = {};
        for (int32_t i = 0; i < dim; ++i) {
            float lanes[page_slots];
            store(lanes, load(keys + i * page_slots));
            const d4 own = {row[i], row[i], row[i], row[i]};
            each<4>([&](auto quad) ALWAYS_INLINE {
                const d4 x = __builtin_convertvector(*reinterpret_cast<const f4_loose*>(lanes + 4 * quad), d4);
                with_row[quad] = with_row[quad] + x * own;
                with_itself[quad] = with_itself[quad] + x * x;
            });
        }
        for (int32_t lane = 0; lane < page_slots; ++lane) {
            products[lane] = with_row[lane / 4][lane % 4];
            squares[lane] = with_itself[lane / 4][lane % 4];
        }
    }
    // Sums of integers below 2^24, which floats hold as they are: four numbers of four slots in each vector.
    void add_up(char* page, double* products, double* squares, Coded) const {
        const uint8_t* keys = numbers_of<uint8_t>(page, 0, 0);
        f16 with_row[4], with_itself[4];
        each<4>([&](auto quad) ALWAYS_INLINE { with_row[quad] = with_itself[quad] = splat(0.0f); });
        float last[16];
        for (int32_t lane = 0; lane < 16; ++lane) last[lane] = dim / 4 * 4 + lane % 4 < dim ? 1.0f : 0.0f;
        for (int32_t i = 0; i < dim; i += 4, keys += 4 * page_slots) {
            const f16 own = load(spread + 4 * i);
            each<4>([&](auto quad) ALWAYS_INLINE {
                f16 x = load_bytes(keys + 16 * quad) - 128.0f;
                if (i + 4 > dim) x = x * load(last);
                with_row[quad] = with_row[quad] + x * own;
                with_itself[quad] = with_itself[quad] + x * x;
            });
        }
        for (int32_t lane = 0; lane < 4 * page_slots; lane += 16) {
            float first[16], second[16];
            store(first, with_row[lane / 16]);
            store(second, with_itself[lane / 16]);
            for (int32_t i = 0; i < 16; ++i) {
                products[(lane + i) / 4] += double(first[i]);
                squares[(lane + i) / 4] += double(second[i]);
            }
        }
    }
};

// Of one key-value head. Merges of a tentative row are kept beside it, and are in the pages only while rows after it are read.
template <class E>
struct Merges {
    const Model& model;
    const Segment& segment;
    const Policy& policy;
    int32_t layer, kv_head;

    int32_t dim() const { return model.head_dim; }
    int64_t row_bytes() const { return int64_t(dim()) * int64_t(sizeof(E)) + (is_coded<E> ? scale_bytes : 0); }
    int64_t at(int32_t place) const { return (int64_t(place) * policy.evicting + policy.places[layer]) * model.kv_heads + kv_head; }
    int32_t* targets(int32_t place) const { return policy.targets + at(place) * policy.merge_room; }
    char* row(int32_t place, int32_t i, int32_t kind) const {
        return policy.merged + ((at(place) * policy.merge_room + i) * 2 + kind) * row_bytes();
    }
    char* page(int32_t slot) const { return segment.base + segment.table(layer, kv_head)[slot / page_slots] * segment.page_bytes; }

    // Lets pages hold what they do after a place, -1: after content, where they hold what they do after another.
    void move(int32_t from, int32_t to) const {
        if (from == to) return;
        if (from > to) {
            exchange(from);
            return move(policy.parents[from], to);
        }
        move(from, policy.parents[to]);
        exchange(to);
    }
    // What a place's merges have changed for what was there before, or the other way round.
    void exchange(int32_t place) const {
        const int32_t* changed = targets(place);
        for (int32_t i = 0; i < policy.merge_room && changed[i] >= 0; ++i)
            for (int32_t kind = 0; kind < 2; ++kind) {
                char *beside = row(place, i, kind), *here = page(changed[i]);
                each_number<E>(here, kind, changed[i], dim(), [&](int32_t n, E* held) {
                    E other;
                    __builtin_memcpy(&other, beside + n * int32_t(sizeof(E)), sizeof(E));
                    __builtin_memcpy(beside + n * int32_t(sizeof(E)), held, sizeof(E));
                    *held = other;
                });
                if constexpr (is_coded<E>) {
                    uint16_t &scale = scales_of(here, kind, round_up(dim(), 16))[changed[i] % page_slots], other;
                    __builtin_memcpy(&other, beside + dim(), scale_bytes);
                    __builtin_memcpy(beside + dim(), &scale, scale_bytes);
                    scale = other;
                }
            }
    }

    // Merges what a row leaves out; worths: after it, of `slots` slots; room: 4 numbers for each of them.
    void leave(int32_t row, const Chosen& seen, const double* worths, int32_t slots, float* room) const {
        const int32_t place = segment.stays + row, parent = policy.parents[place];
        const double known = parent < 0 ? policy.known_limits[layer * model.kv_heads + kv_head] : policy.limits[at(parent)];
        double *near = reinterpret_cast<double*>(room), mean = 0.0;
        int32_t *target = reinterpret_cast<int32_t*>(near + slots), *gone = target + slots, count = 0;
        for (int32_t slot = 0; slot < seen.run; ++slot)
            if (worths[slot] < 0.0) gone[count++] = slot;
        for (int32_t i = 0; i < seen.count; ++i)
            if (worths[seen.list[i]] < 0.0) gone[count++] = seen.list[i];
        policy.limits[at(place)] = known;
        if (count == 0) return;
        for (int32_t i = 0; i < count; ++i) {
            nearest(gone[i], worths, slots, near[i], target[i]);
            mean += near[i];
        }
        mean /= double(count);
        const double limit = known == known ? policy.beta * mean + (1.0 - policy.beta) * known : mean;
        policy.limits[at(place)] = limit;
        int32_t changed = 0;
        for (int32_t i = 0; i < count; ++i)
            if (target[i] < 0 || (policy.threshold != 0 && !(near[i] >= limit))) target[i] = -1;
        for (int32_t i = 0; i < count && changed < policy.merge_room; ++i) {
            bool is_first = target[i] >= 0;
            for (int32_t other = 0; other < i && is_first; ++other) is_first = target[other] != target[i];
            if (!is_first) continue;
            for (int32_t kind = 0; kind < 2; ++kind) join(kind, gone + i, near + i, target + i, count - i, this->row(place, changed, kind));
            targets(place)[changed++] = target[i];
        }
    }
    // The slot that stays, and whose key is most similar, the first of equals.
    void nearest(int32_t slot, const double* worths, int32_t slots, double& near, int32_t& target) const {
        const Compared<E> key(page(slot), slot, dim());
        near = -2.0, target = -1;
        for (int32_t first = 0; first < slots; first += page_slots) {
            const int32_t end = first + page_slots < slots ? page_slots : slots - first;
            bool holds = false;
            for (int32_t lane = 0; lane < end; ++lane) holds |= worths[first + lane] >= 0.0;
            if (!holds) continue;
            double cosines[page_slots];
            key.with(page(first), cosines);
            for (int32_t lane = 0; lane < end; ++lane)
                if (worths[first + lane] >= 0.0 && cosines[lane] > near) near = cosines[lane], target = first + lane;
        }
    }
    // The key [0] or value [1] of the first target, with those that join it, as it is stored.
    void join(int32_t kind, const int32_t* gone, const double* near, const int32_t* target, int32_t count, char* to) const {
        float other[most_dim];
        double sums[most_dim], total = policy.weighted != 0 ? 2.718281828459045 : 1.0;
        row_of(page(*target), kind, *target, dim(), other, E());
        for (int32_t n = 0; n < dim(); ++n) sums[n] = total * double(other[n]);
        for (int32_t i = 0; i < count; ++i) {
            if (target[i] != *target) continue;
            const double weight = policy.weighted != 0 ? __builtin_exp(near[i]) : 1.0, times = policy.weighted != 0 ? 1.0 : near[i];
            row_of(page(gone[i]), kind, gone[i], dim(), other, E());
            for (int32_t n = 0; n < dim(); ++n) sums[n] += weight * (double(other[n]) * times);
            total += weight;
        }
        for (int32_t n = 0; n < dim(); ++n) other[n] = float(sums[n] / total);
        keep(other, to, E());
    }
    template <class T>
    void keep(const float* x, char* to, T) const {
        T numbers[most_dim];
        for (int32_t i = 0; i < dim(); i += 16) store(numbers + i, load(x + i, dim() - i), dim() - i);
        __builtin_memcpy(to, numbers, size_t(dim()) * sizeof(T));
    }
    void keep(const float* x, char* to, Coded) const {
        int8_t numbers[most_dim];
        const uint16_t scale = code_row(x, dim(), numbers);
        for (int32_t i = 0; i < dim(); ++i) to[i] = char(uint8_t(numbers[i]) ^ 0x80);
        __builtin_memcpy(to + dim(), &scale, scale_bytes);
    }
};
