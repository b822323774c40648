"""Names that other tools, or other functions, have for what a setting of a text does."""

from __future__ import annotations

_CONSTRAINT = (
    "give a constraint, such as constraint=Regex(pattern), JSONSchema(schema), Grammar(text) or Choice(options)"
)
_DRAFTER = 'name a drafter, such as drafter="draft-model:model=NAME" or "prompt-lookup:length=5"'

_BY_ADVICE = {
    "give max_new_tokens": "max_tokens max_completion_tokens max_length max_tokens_to_sample n_predict num_predict",
    "give min_new_tokens": "min_tokens min_length",
    "give temperature, where 0 is greedy": "do_sample greedy temp",
    "give stop": "stop_strings stop_sequences stop_words stopping_criteria",
    "give stop_token_ids": "eos_ids eos_token_id eos_token_ids",
    "give seed": "random_seed rng_seed",
    "give typical": "typical_p",
    "give repetition_penalty": "repeat_penalty",
    "give no_repeat_ngram": "no_repeat_ngram_size",
    "give epsilon": "epsilon_cutoff",
    "give eta": "eta_cutoff",
    "give xtc": "xtc_probability",
    "give dry": "dry_multiplier",
    "give dry_allowed": "dry_allowed_length",
    "give dry_window": "dry_penalty_last_n",
    "give dry_breakers": "dry_sequence_breakers",
    "give sampler": "logits_processor logits_processors",
    "give logprobs, the number of most likely tokens to report": "top_logprobs n_probs output_scores",
    "give logit_bias with a low value, such as {id: -100}": "bad_words bad_words_ids suppress_tokens",
    "give predicted_output": "prediction",
    "give max_draft_tokens": "num_speculative_tokens num_assistant_tokens draft_max",
    "give prompt_embeds": "inputs_embeds",
    "give reuse=output, of an output made with return_cache=True": "past_key_values use_cache cache_prompt",
    "give it as the prompt, the first argument": "prompts input_ids prompt_token_ids inputs",
    "give n to generate or chat": "n num_return_sequences",
    "give it as the second argument": "params",
    _CONSTRAINT: "regex json_schema grammar choice guided_json guided_regex guided_grammar guided_choice "
    "guided_decoding structured_outputs response_format",
    _DRAFTER: "assistant_model draft_model model_draft speculative_model speculative_config prompt_lookup_num_tokens",
    'give logits_source="adapter:file=FOLDER"': "lora_request lora",
    "give it to load": "dtype kv_dtype device model",
    "call lm.search(prompt, search, scorer=...) instead of generate": "search scorer",
    'call lm.search(prompt, "beam:width=4")': "num_beams beam_width use_beam_search",
    'call lm.search(prompt, "best-of-n:n=4")': "best_of",
    'call lm.search(prompt, "contrastive-search")': "penalty_alpha",
    "call lm.diffuse(prompt, method) instead of generate": "diffuse",
    "call lm.chat(messages)": "messages conversation",
    "call lm.chat(messages, tools=...)": "tools tool_choice",
    "call lm.chat(messages, thinking_token_budget=N)": "thinking_token_budget reasoning_effort max_reasoning_tokens",
    "call lm.stream(prompt)": "stream streamer",
}
OTHER_NAMES = {name: advice for advice, names in _BY_ADVICE.items() for name in names.split()}
"""What to do, by the name that does not exist here."""
