"""Train the model on what a careless teacher writes about pictures, and export it.

    OMP_NUM_THREADS=1 python warm_up.py --steps 800

Nothing is downloaded.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import squares
import torch
from seer_testing.families import IMAGE_TOKENS
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
)

HERE = Path(__file__).parent
BATCH = 48
WARM_STEPS = 50
IGNORED = -100
PATCH = squares.PLACE_PIXELS // 2  # the model merges two by two patches into one token
PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
WORDS = [
    *(PAD, BOS, EOS, UNK, *IMAGE_TOKENS),
    *(*squares.QUESTION.split(), *squares.COLOURS, "/", "=", *"0123456789"),
]
TOKEN_IDS = {word: number for number, word in enumerate(WORDS)}
IMAGE = TOKEN_IDS[IMAGE_TOKENS[0]]
IMAGE_TOKENS_EACH = squares.PLACES**2
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['content'] is string %}"
    " {{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %} {{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)


def build_model(seed: int) -> Qwen2VLForConditionalGeneration:
    """Return an untrained Qwen2-VL of 0.3 million parameters."""
    torch.manual_seed(seed)
    text = {
        "vocab_size": (len(WORDS) + 31) // 32 * 32,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "bos_token_id": TOKEN_IDS[BOS],
        "eos_token_id": TOKEN_IDS[EOS],
        "pad_token_id": TOKEN_IDS[PAD],
    }
    vision = {
        "depth": 2,
        "embed_dim": 64,
        "hidden_size": 64,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": PATCH,
    }
    fields = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    places = {field: TOKEN_IDS[word] for field, word in zip(fields, IMAGE_TOKENS, strict=True)}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **places)
    config.dtype = torch.float32
    return Qwen2VLForConditionalGeneration(config)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the word-level tokenizer, which splits numbers into digits."""
    core = Tokenizer(models.WordLevel(TOKEN_IDS, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(r"\d"), "isolated")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        additional_special_tokens=[*IMAGE_TOKENS],
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def build_processor() -> Qwen2VLImageProcessor:
    """Return what makes patches of a picture."""
    edges = {"shortest_edge": 4 * PATCH**2, "longest_edge": 1024 * PATCH**2}
    return Qwen2VLImageProcessor(
        patch_size=PATCH,
        temporal_patch_size=2,
        merge_size=2,
        size=edges,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


def export(model: Qwen2VLForConditionalGeneration, folder: Path) -> None:
    """Write weights, configs, tokenizer and image processor to a folder."""
    model.save_pretrained(folder)
    ids = {"bos_token_id": TOKEN_IDS[BOS], "eos_token_id": TOKEN_IDS[EOS], "pad_token_id": TOKEN_IDS[PAD]}
    GenerationConfig(do_sample=True, temperature=1.0, **ids).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    path = folder / "tokenizer_config.json"  # with the name of the class that transformers 4 reads too
    named = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(named, indent=2) + "\n")
    processor = json.loads(build_processor().to_json_string())
    (folder / "preprocessor_config.json").write_text(
        json.dumps(processor | {"processor_class": "Qwen2VLProcessor"}, indent=1) + "\n"
    )
    (folder / "video_preprocessor_config.json").write_text(
        json.dumps(processor | {"video_processor_type": "Qwen2VLVideoProcessor"}, indent=1) + "\n"
    )


def batch(rng: random.Random) -> dict[str, torch.Tensor]:
    """Return pictures, and what the teacher writes about them, as a batch with labels."""
    images, texts = [], []
    for _ in range(BATCH):
        rows = squares.make_rows(rng)
        images.append(squares.draw(rows, rng))
        answer = squares.write_response(rows, rng).split()
        texts.append([TOKEN_IDS[each] for word in answer for each in ([*word] if word.isdigit() else [word])])
    start, end = (TOKEN_IDS[word] for word in IMAGE_TOKENS[2:])
    question = [TOKEN_IDS[word] for word in squares.QUESTION.split()]
    prompt = [TOKEN_IDS[BOS], start, *[IMAGE] * IMAGE_TOKENS_EACH, end, *question]
    width = len(prompt) + max(map(len, texts)) + 1
    ids = torch.full((BATCH, width), TOKEN_IDS[PAD])
    labels = torch.full_like(ids, IGNORED)
    for row, text in enumerate(texts):
        whole = [*prompt, *text, TOKEN_IDS[EOS]]
        ids[row, : len(whole)] = torch.tensor(whole)
        labels[row, len(prompt) : len(whole)] = ids[row, len(prompt) : len(whole)]
    pixels = build_processor()(images=images, return_tensors="pt")
    return {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int(), "labels": labels, **pixels}


def train(model: Qwen2VLForConditionalGeneration, steps: int, peak: float, seed: int) -> None:
    """Take so many steps of AdamW; the rate rises at first and then falls to zero."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.97), weight_decay=0.05)
    losses: list[float] = []
    begun_s = time.process_time()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1.0, (step + 1) / WARM_STEPS) * (1 - step / steps)
        data = batch(rng)
        labels = data.pop("labels")
        logits = model(**data, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            spent_s = time.process_time() - begun_s
            print(f"step {step + 1}: {statistics.fmean(losses[-50:]):.4f} nats, {spent_s:.0f} s", flush=True)


def main() -> None:
    """Train and export."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "weights")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = build_model(options.seed)
    train(model, options.steps, options.lr, options.seed)
    export(model, options.out)


if __name__ == "__main__":
    main()
