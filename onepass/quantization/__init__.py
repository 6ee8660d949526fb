"""FP8 (e4m3) in plain PyTorch: descales, the rotation of Q and K, and the means subtracted before rounding.

An e4m3 number has a sign, 4 bits of exponent and 3 of mantissa: magnitudes 2^-9 to 448, each rounded by up to 1/16 of
itself. Descales keep values in that range; the mantissa limits the accuracy. Three transformations do not change the
result of exact arithmetic and are applied before rounding:

    rotation    Q M and K M with one orthogonal M (random signs, then a Hadamard matrix): (Q M)(K M)^T = Q K^T. An
                outlier is spread over all columns; without the rotation, outliers of Q and K in one column would
                multiply their rounding errors.
    mean of K   subtracting a vector m from all keys lowers each score of row i by q_i . m: softmax does not change, and
                lse is corrected by `score_shift`.
    mean of V   rows of P sum to 1, so softmax(S) (V - m) + m = softmax(S) V.

Source: FlashAttention-3, arXiv:2407.08608, section 3.3; QuIP, arXiv:2307.13304 (random signs and Hadamard matrices).
"""
