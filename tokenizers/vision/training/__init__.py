"""How the picture weights are made: only ``ernie-multi tokenizer train`` and ``evaluate`` come here.

In order: ``data`` draws the batches, ``quantiser`` passes gradients through the bits, ``losses`` (with the
networks of ``teacher``) and ``metrics`` say how far a drawing is off, ``optimizer`` steps, ``train`` is the
recipe, ``judge`` and ``evaluation`` measure what came of it. ``driver`` and ``checkpoint`` carry any recipe
of the vision tokenizers through its steps and interruptions.
"""
