"""Exchange with other frameworks: Hugging Face folders of the Ernie 4.5 family, both ways.

The text path of a :class:`~ernie5.backbone.model.transformer.Backbone` is the network of
``Ernie4_5_MoeForCausalLM``, so weights move without arithmetic and logits agree. Neither direction needs
the package ``transformers``.
"""

from ernie5.backbone.interop.export import export_model
from ernie5.backbone.interop.importing import UpcycledExperts, import_model

__all__ = ["UpcycledExperts", "export_model", "import_model"]
