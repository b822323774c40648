// A draft head's whole step: the target's states to features, tokens beside them, one layer, words. Its layers are
// quantized. Included once per instruction set.

struct Drafting {
    const State& state;
    const Draft& draft;
    const Guess& guess;
    const Model& model;
    Runner runner;
    const int64_t hidden;
    const size_t bytes;    // of a row of floats

    Drafting(const State& s, int32_t thread, Team& team)
        : state(s), draft(*s.draft), guess(*s.guess), model(*s.model), runner(s, thread, team), hidden(s.model->hidden),
          bytes(size_t(hidden) * sizeof(float)) {}

    // The rows' features, made of the target's states where those are what is given.
    void enter() {
        const Range mine = runner.my_rows();
        if (!guess.entering) {
            for (int64_t row = mine.begin; row < mine.end; ++row)
                __builtin_memcpy(state.pass->hidden + row * hidden, guess.given[row], bytes);
            return;
        }
        const int64_t width = draft.taps * hidden;
        for (int64_t row = mine.begin; row < mine.end; ++row)
            for (int64_t tap = 0; tap < draft.taps; ++tap)
                __builtin_memcpy(state.entering.floats + row * width + tap * hidden, guess.given[row * draft.taps + tap], bytes);
        runner.quantize_rows(state.entering.floats, int32_t(width), state.entering, draft.enter);
        runner.project(draft.enter, state.entering, state.pass->hidden);
    }

    // What attention reads: tokens beside features.
    void pair() {
        const Range mine = runner.my_rows();
        const int32_t n = model.hidden;
        for (int64_t row = mine.begin; row < mine.end; ++row) {
            float *both = state.paired.floats + row * 2 * hidden, *stream = state.pass->hidden + row * hidden;
            if (guess.narrow) copy(static_cast<const Bf16*>(guess.embedded[row]), n, both);
            else copy(static_cast<const float*>(guess.embedded[row]), n, both);
            normalize(both, draft.token_norm, n, model.eps, both);
            normalize(stream, draft.feature_norm, n, model.eps, both + hidden);
            if (draft.norm_first) __builtin_memcpy(stream, both + hidden, bytes);
        }
        runner.quantize_rows(state.paired.floats, 2 * n, state.paired, model.layers->qkv);
    }
    template <class E>
    static void copy(const E* x, int32_t n, float* y) {
        for (int32_t i = 0; i < n; i += 16) store(y + i, load(x + i, n - i), n - i);
    }
};

static void run_draft(void* context, int32_t thread, Team& team) {
    const State& state = *static_cast<const State*>(context);
    const Model& model = *state.model;
    const Guess& guess = *state.guess;
    Drafting drafting(state, thread, team);
    drafting.enter();
    drafting.pair();
    drafting.runner.project(model.layers->qkv, state.paired, state.qkv);
    drafting.runner.rope(*model.layers, 0);
    // The layer from behind the rows' keys and values on.
    drafting.runner.layer(0, at_select);
    Pass last = *state.pass;
    last.hidden = guess.features;
    last.rows = guess.spoken;
    State speaking = state;
    speaking.pass = &last;
    Runner speaker(speaking, thread, team);
    const Range mine = speaker.my_rows();
    const int64_t hidden = model.hidden, outputs = model.head.out, k = guess.k;
    for (int64_t row = mine.begin; row < mine.end; ++row) {
        const int64_t source = guess.said == nullptr ? row : guess.said[row];
        __builtin_memcpy(guess.features + row * hidden, state.pass->hidden + source * hidden, size_t(hidden) * sizeof(float));
    }
    speaker.norm_quantize(model.norm, model.head);
    speaker.project(model.head, state.narrow, guess.logits);
    if (k == 0) return;
    for (int64_t row = mine.begin; row < mine.end; ++row) {
        int32_t* ids = guess.ids + row * k;
        const float* logits = guess.logits + row * outputs;
        if (!run_topk(logits, int32_t(outputs), int32_t(k), ids, guess.chances + row * k)) {
            *state.strange = 1;
            continue;
        }
        run_chances(logits, int32_t(outputs), int32_t(k), guess.chances + row * k);
        if (guess.vocabulary != nullptr)
            for (int64_t i = 0; i < k; ++i) ids[i] = guess.vocabulary[ids[i]];
    }
}
