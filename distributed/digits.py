"""Generated images of digits, for runs without data.

Each image is one of ten glyphs, slightly rotated, slanted, scaled and shifted, plus
noise; none is handwritten.
"""

import numpy as np

SIZE = 28  # [pixels], as in MNIST

# Rows of 5 pixels from top to bottom; each row is the bits of one number.
_GLYPHS = {
    0: (14, 17, 19, 21, 25, 17, 14),
    1: (4, 12, 4, 4, 4, 4, 14),
    2: (14, 17, 1, 2, 4, 8, 31),
    3: (31, 2, 4, 2, 1, 17, 14),
    4: (2, 6, 10, 18, 31, 2, 2),
    5: (31, 16, 30, 1, 1, 17, 14),
    6: (6, 8, 16, 30, 17, 17, 14),
    7: (31, 1, 2, 4, 8, 8, 8),
    8: (14, 17, 17, 14, 17, 17, 14),
    9: (14, 17, 17, 15, 1, 2, 12),
}
_PIXELS = 3.0  # image pixels per glyph pixel


def generate(num_images: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (images uint8 [N, 28, 28], labels int32 [N]), the same for the same seed.

    Args:
        num_images: Number of images N, >= 1.
        seed: Random seed, 0 <= seed < 2**32.
    """
    # RandomState, not default_rng: NumPy guarantees that its numbers never change.
    random = np.random.RandomState(seed)
    labels = random.randint(0, len(_GLYPHS), num_images).astype(np.int32)
    angle = random.uniform(-0.25, 0.25, num_images)
    slant = random.uniform(-0.2, 0.2, num_images)
    scale = random.uniform(0.85, 1.15, [2, num_images]) / _PIXELS
    shift = random.uniform(-3.0, 3.0, [2, num_images])
    rows, columns = np.mgrid[:SIZE, :SIZE].astype(np.float64) - (SIZE - 1) / 2
    down = rows[None] - shift[0, :, None, None]  # [N, 28, 28]
    right = columns[None] - shift[1, :, None, None]
    cosine, sine = (f(angle)[:, None, None] for f in (np.cos, np.sin))
    turned_down = (cosine * down + sine * right) * scale[0, :, None, None]
    turned_right = (cosine * right - sine * down) * scale[1, :, None, None]
    turned_right += slant[:, None, None] * turned_down
    ink = _sample(labels, turned_down, turned_right)
    ink = 255 * ink + random.normal(0, 12, ink.shape)
    return np.clip(ink, 0, 255).astype(np.uint8), labels


def _sample(labels: np.ndarray, down: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Returns the glyphs' ink, 0 to 1, at offsets from their centers [glyph pixels]."""
    # 2 empty pixels around each glyph: offsets outside it are clipped to them.
    glyphs = np.zeros([len(_GLYPHS), 11, 9])
    for digit, bits in _GLYPHS.items():
        glyphs[digit, 2:-2, 2:-2] = [
            [b >> n & 1 for n in range(4, -1, -1)] for b in bits
        ]
    down, right = np.clip(down + 5, 0, 9.999), np.clip(right + 4, 0, 7.999)
    top, left = down.astype(int), right.astype(int)
    down, right = down - top, right - left
    digit = labels[:, None, None]
    upper, lower = (
        glyphs[digit, row, left] * (1 - right) + glyphs[digit, row, left + 1] * right
        for row in (top, top + 1)
    )
    return upper * (1 - down) + lower * down
