// Layers that mix rows, within a pass: their rows are put into a cache's pages and gathered with those before them, the states
// after the content are brought up to date, and all tentative rows go on from there. Included once per instruction set.

struct Mix {
    const State& state;
    const Pass& pass;
    const Mixer& mixer;
    const int32_t index, kv_heads, dim, thread;
    Team& team;
    const int32_t width = mixed_width(mixer), inner = mixed_inner(mixer), row = mixed_row(mixer);

    // Rows of one segment that are mixed at once: [from, to) of the content, behind `reach` rows, then the tentative ones, if
    // they are in `turn`. first: where the segment's rows begin in the pass; at: in what is held.
    struct Span {
        const Segment* segment;
        int32_t content, from, to, reach, tentative, first;
        int64_t at;
        bool begins;    // whether states are still those that were known

        int32_t rows() const { return reach + to - from + tentative; }
    };

    // Calls work(span) for every segment that has rows in a turn, of so many.
    template <class Work>
    void each_span(int32_t turn, int32_t turns, const Work& work) const {
        int64_t at = 0;
        for (int32_t s = 0; s < pass.segment_count; ++s) {
            const Segment& segment = pass.segments[s];
            Span span = {&segment, 0, 0, 0, 0, 0, state.rows[s].first, at, false};
            span.content = segment.keeps != 0 ? int32_t(segment.length(index, 0)) : 0;
            const int32_t own = turn - (turns - turns_of(segment));
            if (own < 0) continue;
            const bool stateless = mixer.rule == gated_conv;
            span.from = stateless ? span.content : segment.known + own * mix_chunk;
            span.to = turn + 1 == turns ? span.content : span.from + mix_chunk;
            span.begins = own == 0;
            span.reach = span.from < mixer.kernel - 1 ? span.from : mixer.kernel - 1;
            span.tentative = turn + 1 == turns ? segment.stays + segment.rows : 0;
            work(span);
            at += span.rows();
        }
    }
    int32_t turns_of(const Segment& segment) const {
        if (mixer.rule == gated_conv || segment.keeps == 0) return 1;
        const int32_t more = int32_t(segment.length(index, 0)) - segment.known;
        return more <= mix_chunk ? 1 : (more + mix_chunk - 1) / mix_chunk;
    }

    // Calls work(number of what is kept of a row, how many follow it, where the first of them is in a page, how far apart they are).
    template <class Work>
    void each_run(const Segment& segment, int32_t slot, const Work& work) const {
        const int32_t wide = round_up(dim, 16), lane = slot % page_slots;
        for (int32_t i = 0, run = 0; i < width; i += dim, ++run) {
            const int32_t layer = mixer.slots[run / (2 * kv_heads)], kind = run / kv_heads % 2, head = run % kv_heads;
            char* page = segment.base + segment.table(layer, head)[slot / page_slots] * segment.page_bytes;
            float* numbers = numbers_of<float>(page, kind, wide);
            work(i, width - i < dim ? width - i : dim, kind == 0 ? numbers + lane : numbers + lane * wide, kind == 0 ? page_slots : 1);
        }
    }
    // One row of a span: an earlier one from the pages, one of the pass's own to them.
    void gather(const Span& span, int32_t i) const {
        const Segment& segment = *span.segment;
        float* held = state.mix.held + (span.at + i) * width;
        const int32_t slot = span.from - span.reach + i, own = slot - span.content - segment.stays;
        if (own < 0) {
            each_run(segment, slot, [&](int32_t first, int32_t n, const float* x, int32_t apart) {
                for (int32_t k = 0; k < n; ++k) held[first + k] = x[int64_t(k) * apart];
            });
            return;
        }
        const float* x = state.qkv + int64_t(span.first + own) * row;
        if (mixer.rule == gated_conv)
            for (int32_t k = 0; k < width; ++k) held[k] = x[k] * x[2 * width + k];
        else __builtin_memcpy(held, x + inner, size_t(width) * sizeof(float));
        if (segment.keeps == 0) return;
        each_run(segment, slot, [&](int32_t first, int32_t n, float* to, int32_t apart) {
            for (int32_t k = 0; k < n; ++k) to[int64_t(k) * apart] = held[first + k];
        });
    }

    // A span as the stages of mixing take it: the content, then the tentative rows.
    struct Parts {
        Mixed rows[2];
        Mixing mixings[2];
        int32_t count = 0;
    };
    void parts_of(const Span& span, Parts& parts) const {
        const Segment& segment = *span.segment;
        const int32_t channels = mixed_channels(mixer), more = span.to - span.from;
        const float* held = state.mix.held + span.at * width;
        const float* begin = segment.states + mixer.state_at;
        float* after = segment.after == nullptr ? nullptr : segment.after + mixer.state_at;
        const auto add = [&](const Mixed& rows) {
            const int64_t at = span.at + rows.reach;
            parts.rows[parts.count] = rows;
            parts.mixings[parts.count] = {&mixer, parts.rows + parts.count, state.mix.mixed + at * channels, state.mix.steps + at * mixer.heads,
                                          state.mix.left + at * mixed_left(mixer), state.mix.room, state.mix.room_stride, channels};
            ++parts.count;
        };
        const float* gate = state.qkv + int64_t(span.first) * row;
        float* out = state.context + int64_t(span.first) * inner;
        // Where no states are to be left between them, the content is gone through with the rows that follow it.
        const bool joined = span.tentative > 0 && segment.through != 0;
        if (joined || (more > 0 && after == nullptr))
            return add({held, nullptr, span.begins ? begin : after, after, gate, out, row, span.reach, more + span.tentative, segment.rows});
        if (more > 0) add({held, nullptr, span.begins ? begin : after, after, nullptr, nullptr, 0, span.reach, more, 0});
        if (span.tentative == 0) return;
        const bool moved = more > 0 || !span.begins;
        add({held, segment.parents, moved ? after : begin, nullptr, gate, out, row, span.reach + more, span.tentative, segment.rows});
    }

    // Numbers [first, last) of what a row says after a convolution between two gates.
    void convolve_gated(const Span& span, int32_t own, int32_t first, int32_t last) const {
        const Mixed rows = {state.mix.held + span.at * width, span.segment->parents, nullptr, nullptr, nullptr, nullptr, 0, span.reach, span.tentative, 0};
        const float* gate = state.qkv + int64_t(span.first + own) * row + width;
        float* out = state.context + int64_t(span.first + own) * inner;
        for (int32_t c = first; c < last; c += 16) {
            const int32_t n = last - c;
            f16 sum = splat(0.0f);
            int32_t place = span.reach + span.segment->stays + own;
            for (int32_t k = mixer.kernel; k > 0 && place >= 0; --k, place = before(rows, place))
                sum = sum + load(rows.held + int64_t(place) * width + c, n) * load(mixer.conv + int64_t(k - 1) * width + c, n);
            store(out + c, load(gate + c, n) * sum, n);
        }
    }

    template <class Meet>
    void run(const Meet& meet) const {
        const int32_t threads = team.threads;
        int32_t turns = 1;
        for (int32_t s = 0; s < pass.segment_count; ++s) {
            const int32_t own = turns_of(pass.segments[s]);
            turns = own > turns ? own : turns;
        }
        const auto stage = [&](int32_t turn, const auto& work) {
            each_span(turn, turns, [&](const Span& span) {
                Parts parts;
                parts_of(span, parts);
                // A segment may have no rows.
                if (parts.count > 0) work(parts);
            });
            meet();
        };
        for (int32_t turn = 0; turn < turns; ++turn) {
            each_span(turn, turns, [&](const Span& span) {
                const Range mine = share(span.rows(), thread, threads);
                for (int32_t i = mine.begin; i < mine.end; ++i) gather(span, i);
            });
            meet();
            if (mixer.rule == gated_conv) {
                const Range mine = share((width + 15) / 16, thread, threads);
                each_span(turn, turns, [&](const Span& span) {
                    for (int32_t own = 0; own < span.segment->rows; ++own)
                        convolve_gated(span, own, mine.begin * 16, mine.end * 16 < width ? mine.end * 16 : width);
                });
                meet();
                continue;
            }
            stage(turn, [&](const Parts& parts) {
                for (int32_t i = 0; i < parts.count; ++i) mix_inputs(parts.mixings[i], thread, threads);
            });
            const auto each = [&](const auto& work) {
                stage(turn, [&](const Parts& parts) {
                    for (int32_t i = 0; i < parts.count; ++i) work(parts.mixings[i], thread, threads);
                });
            };
            if (mixer.rule == gated_delta) each(mix_lengths);
            if (mixer.rule == mamba1) {
                each(mix_leads);
                each(mix_lead_norms);
                each(mix_steps);
            }
            stage(turn, [&](const Parts& parts) { mix_states(parts.mixings, parts.count, thread, threads); });
            if (turn + 1 == turns)
                stage(turn, [&](const Parts& parts) { mix_gates(parts.mixings[parts.count - 1], thread, threads); });
        }
    }
};
