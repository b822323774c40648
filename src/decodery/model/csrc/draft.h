// A draft head's whole step: the target's states to features, tokens beside them, one layer, words. Its layers are
// quantized. Included once per instruction set.

struct Drafting {
    const State& state;
    const Draft& draft;
    const Guess& guess;
    Runner runner;
    const int32_t hidden;

    Drafting(const State& s, int32_t thread, Team& team)
        : state(s), draft(*s.draft), guess(*s.guess), runner(s, thread, team), hidden(s.model->hidden) {}

    // The target's states -> features.
    void enter() {
        const Range mine = runner.my_rows();
        const int32_t width = draft.taps * hidden;
        for (int64_t row = mine.begin; row < mine.end; ++row)
            for (int32_t tap = 0; tap < draft.taps; ++tap)
                __builtin_memcpy(state.entering.floats + row * width + tap * hidden, guess.states[tap] + row * hidden,
                                 size_t(hidden) * sizeof(float));
        runner.quantize_rows(state.entering.floats, width, state.entering, draft.enter);
        runner.project(draft.enter, state.entering, guess.pass.hidden);
    }

    // What attention reads: tokens beside features.
    void pair() {
        const Range mine = runner.my_rows();
        const float eps = state.model->eps;
        for (int64_t row = mine.begin; row < mine.end; ++row) {
            float *both = state.paired.floats + row * 2 * hidden, *stream = guess.pass.hidden + row * hidden;
            normalize(guess.embedded + row * hidden, draft.token_norm, hidden, eps, both);
            normalize(stream, draft.feature_norm, hidden, eps, both + hidden);
            if (draft.norm_first) __builtin_memcpy(stream, both + hidden, size_t(hidden) * sizeof(float));
        }
        runner.quantize_rows(state.paired.floats, 2 * hidden, state.paired, state.model->layers->qkv);
    }
};

static void run_draft(void* context, int32_t thread, Team& team) {
    const State& state = *static_cast<const State*>(context);
    const Model& model = *state.model;
    const Layer& layer = *model.layers;
    Drafting drafting(state, thread, team);
    if (state.guess->states != nullptr) drafting.enter();
    drafting.pair();
    drafting.runner.project(layer.qkv, state.paired, state.qkv);
    drafting.runner.rope(layer, 0);
    // The layer from behind the rows' keys and values on.
    drafting.runner.layer(0, 0, at_select);
    Pass last = *state.pass;
    last.hidden += int64_t(last.rows - state.guess->spoken) * model.hidden;
    last.rows = state.guess->spoken;
    State speaking = state;
    speaking.pass = &last;
    Runner speaker(speaking, thread, team);
    speaker.norm_quantize(model.norm, model.head);
    speaker.project(model.head, state.narrow, state.guess->logits);
}
