"""One picture or sound as a processor returns it: the number of its placeholders, and the processor's keys.

``draw`` makes random tensors of a shape, and ``which`` chooses among sizes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Document = dict[str, torch.Tensor]
Draw = Callable[..., torch.Tensor]

# heights and widths in pixels, for models that take any
SIZES = ((28, 28), (28, 56), (56, 28))


def grid(draw: Draw, which: int) -> tuple[int, Document]:
    # Qwen-VL: patches have 14 x 14 pixels and two frames, and four of them become one token.
    grid = ((1, 4, 8), (1, 4, 4), (1, 8, 4))[which % 3]
    patches = grid[0] * grid[1] * grid[2]
    return patches // 4, {
        "pixel_values": draw(patches, 3 * 2 * 14 * 14),
        "image_grid_thw": torch.tensor([grid]),
    }


def plain(draw: Draw, which: int) -> tuple[int, Document]:
    return 4, {"pixel_values": draw(1, 3, 28, 28)}


def crops(draw: Draw, which: int) -> tuple[int, Document]:
    # LLaVA-Next takes the whole picture and its crops. Rows of patches end with one more token each.
    height, width = SIZES[which % 3] if which % 3 else (56, 56)
    rows, columns = height // 14, width // 14
    pixels = draw(1, 1 + (height // 28) * (width // 28), 3, 28, 28)
    return 4 + rows * (columns + 1), {"pixel_values": pixels, "image_sizes": torch.tensor([[height, width]])}


def any_size(draw: Draw, which: int) -> tuple[int, Document]:
    height, width = SIZES[which % 3]
    sizes = torch.tensor([[height, width]])
    return (height // 14) * (width // 14), {"pixel_values": draw(1, 3, height, width), "image_sizes": sizes}


def masked(draw: Draw, which: int) -> tuple[int, Document]:
    # Idefics 2 takes pictures of any size up to that of the tower.
    height, width = (28, 28) if which % 2 == 0 else (14, 28)
    return 4, {
        "pixel_values": draw(1, 1, 3, height, width),
        "pixel_attention_mask": torch.ones(1, 1, height, width, dtype=torch.long),
    }


def square(draw: Draw, which: int) -> tuple[int, Document]:
    # In Idefics 3 and SmolVLM all pictures have the tower's size.
    mask = torch.ones(1, 1, 28, 28, dtype=torch.long)
    return 4, {"pixel_values": draw(1, 1, 3, 28, 28), "pixel_attention_mask": mask}


def positioned(draw: Draw, which: int) -> tuple[int, Document]:
    # Gemma 4 takes patches of 4 x 4 pixels with their places, filled to 16. Four of them become one token.
    across, down = ((4, 4), (4, 2), (2, 8))[which % 3]
    places = torch.cartesian_prod(torch.arange(down), torch.arange(across)).flip(-1)
    filled = torch.nn.functional.pad(places, (0, 0, 0, 16 - len(places)), value=-1)
    real = (filled[:, :1] >= 0).float()
    return len(places) // 4, {"pixel_values": draw(1, 16, 3 * 4 * 4) * real, "image_position_ids": filled[None]}


def one_token(draw: Draw, which: int) -> tuple[int, Document]:
    return 1, {"pixel_values": draw(1, 3, 28, 28)}


def phi(draw: Draw, which: int) -> tuple[int, Document]:
    height, width = SIZES[1 + which % 2]
    crops = 1 + (height // 28) * (width // 28)
    count = (height // 14) * (width // 14 + 1) + 1 + 2 * 3
    return count, {
        "image_pixel_values": draw(1, crops, 3, 28, 28),
        "image_sizes": torch.tensor([[height, width]]),
        "image_attention_mask": torch.ones(1, crops, 4, 4),
    }


def phi_sound(draw: Draw, which: int) -> tuple[int, Document]:
    return 3, {"audio_input_features": draw(1, 24, 80), "audio_embed_sizes": torch.tensor([3])}


def sound(draw: Draw, which: int) -> tuple[int, Document]:
    # Qwen2-Audio's features are filled to the length that the encoder takes. It halves them twice.
    frames = 16 - 4 * (which % 2)
    mask = (torch.arange(16) < frames).long()[None]
    return (frames // 2 - 2) // 2 + 1, {
        "input_features": draw(1, 8, 16) * mask[:, None],
        "feature_attention_mask": mask,
    }


def omni_sound(draw: Draw, which: int) -> tuple[int, Document]:
    # Qwen2.5-Omni takes features of any length.
    frames = (16, 12, 20)[which % 3]
    return (frames // 2 - 2) // 2 + 1, {
        "input_features": draw(1, 8, frames),
        "feature_attention_mask": torch.ones(1, frames, dtype=torch.long),
    }
