"""Names alone: nothing drafts here."""


class LlamaDraftModel: ...


class LlamaPromptLookupDecoding: ...
