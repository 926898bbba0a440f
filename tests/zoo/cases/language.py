"""Language models of transformers, with PEFT's adapters, and of x-transformers."""

from __future__ import annotations

from typing import Any

import torch

from zoo.case import Case, Project

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def texts(n: int, labels: int = 2) -> dict[str, torch.Tensor]:
    """Sentences of twelve tokens, every second one padded."""
    mask = torch.ones(n, 12, dtype=torch.int64)
    mask[::2, 9:] = 0
    return {
        "input_ids": torch.randint(3, 60, (n, 12)),
        "attention_mask": mask,
        "labels": torch.randint(labels, (n,)),
    }


def continued(n: int) -> dict[str, torch.Tensor]:
    rows = texts(n)
    return {**rows, "labels": rows["input_ids"].clone()}


def tagged(n: int) -> dict[str, torch.Tensor]:
    return {**texts(n), "labels": torch.randint(2, (n, 12))}


def project(net: Any, lr: float = 0.05) -> Project:
    return Project(net, lambda net, batch: net(**batch).loss, lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9))


def bert(**options: Any) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=60, max_position_embeddings=16, **{**SIZES, **STILL, **options})
    return BertForSequenceClassification(config)


def roberta() -> Any:
    from transformers import RobertaConfig, RobertaForTokenClassification

    return RobertaForTokenClassification(RobertaConfig(vocab_size=60, max_position_embeddings=20, **SIZES, **STILL))


def distilbert() -> Any:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(
        vocab_size=60, max_position_embeddings=16, dim=16, n_layers=2, n_heads=2, hidden_dim=32, dropout=0.0,
        attention_dropout=0.0, seq_classif_dropout=0.0,
    )  # fmt: skip
    return DistilBertForSequenceClassification(config)


def gpt2(**options: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(vocab_size=60, n_positions=16, n_embd=16, n_layer=2, n_head=2, **still))


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=60, max_position_embeddings=16, num_key_value_heads=1, **SIZES)
    return LlamaForCausalLM(config)


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(vocab_size=60, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
                 decoder_start_token_id=0)
    )  # fmt: skip


def adapted(net: Any, targets: list[str]) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(net, LoraConfig(r=4, lora_alpha=8, target_modules=targets, lora_dropout=0.0))


def rotary() -> Any:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=16, depth=2, heads=2, rotary_pos_emb=True)
    return AutoregressiveWrapper(TransformerWrapper(num_tokens=60, max_seq_len=16, attn_layers=layers))


CASES = [
    Case("BERT", "transformers", lambda: project(bert()), texts),
    Case("BERT with its dropout", "transformers", lambda: project(bert(**dict.fromkeys(STILL, 0.1))), texts),
    Case("RoBERTa, labels of tokens", "transformers", lambda: project(roberta()), tagged),
    Case("DistilBERT", "transformers", lambda: project(distilbert()), texts),
    Case("GPT-2", "transformers", lambda: project(gpt2()), continued),
    Case("Llama", "transformers", lambda: project(llama()), continued),
    Case("T5", "transformers", lambda: project(t5()), continued),
    Case("BERT, LoRA", "peft", lambda: project(adapted(bert(), ["query", "value"]), lr=2.0), texts),
    Case("GPT-2, LoRA", "peft", lambda: project(adapted(gpt2(), ["c_attn"]), lr=0.5), continued),
    Case(
        "Decoder with rotary positions",
        "x_transformers/x-transformers",
        lambda: Project(rotary(), lambda net, batch: net(batch["input_ids"])),
        continued,
    ),
]
