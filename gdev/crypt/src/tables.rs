//! AES-256 tables and round keys for the kernels. A round computes each column from four look-ups and a round key word.
//!
//! Words are little-endian. Decryption uses the equivalent inverse cipher. Source: FIPS 197.

use zeroize::Zeroizing;

/// Number of rounds of AES-256.
pub const ROUNDS: usize = 14;
/// Total number of 32-bit words in the round keys.
const KEY_WORDS: usize = 4 * (ROUNDS + 1);
/// Number of 32-bit words in the key.
const NK: usize = 8;
/// Offset of the last round's table in bytes, after the four tables for the other rounds.
pub const LAST_ROUND_OFFSET: usize = 0x1000;
/// Offset of the round keys in bytes.
pub const KEYS_OFFSET: usize = 0x1400;
/// Total size of the tables and round keys in bytes, a multiple of the number of bytes that a thread block copies per
/// loop iteration.
pub const TABLE_BYTES: usize = 0x1800;

/// Direction of a transformation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Plaintext to ciphertext.
    Encrypt,
    /// Ciphertext to plaintext.
    Decrypt,
}

impl Direction {
    /// Both directions.
    pub const ALL: [Self; 2] = [Self::Encrypt, Self::Decrypt];

    /// Returns the name of the kernel for this direction.
    pub fn name(self) -> &'static str {
        match self {
            Self::Encrypt => "encrypt",
            Self::Decrypt => "decrypt",
        }
    }
}

/// Multiplies by x in the AES field.
fn double(value: u8) -> u8 {
    value << 1 ^ if value & 0x80 == 0 { 0 } else { 0x1b }
}

fn multiply(left: u8, right: u8) -> u8 {
    let (mut product, mut power) = (0, left);
    for bit in 0..8 {
        if right >> bit & 1 == 1 {
            product ^= power;
        }
        power = double(power);
    }
    product
}

/// Returns the S-box and its inverse.
fn substitutions() -> ([u8; 256], [u8; 256]) {
    let (mut forward, mut inverse) = ([0; 256], [0; 256]);
    // 3 generates the field's multiplicative group, and 0xf6 is the inverse of 3, so the product of each pair is 1.
    let (mut value, mut reciprocal) = (1u8, 1u8);
    let substitute = |of: u8| of ^ of.rotate_left(1) ^ of.rotate_left(2) ^ of.rotate_left(3) ^ of.rotate_left(4) ^ 0x63;
    for _ in 0..255 {
        forward[usize::from(value)] = substitute(reciprocal);
        value = multiply(value, 3);
        reciprocal = multiply(reciprocal, 0xf6);
    }
    forward[0] = 0x63;
    for (from, to) in (0..=255).zip(forward) {
        inverse[usize::from(to)] = from;
    }
    (forward, inverse)
}

/// Returns the round keys for encryption.
fn expand(key: &[u8], substitution: &[u8; 256]) -> Zeroizing<[u32; KEY_WORDS]> {
    let mut words = Zeroizing::new([0; KEY_WORDS]);
    for (word, bytes) in words.iter_mut().zip(key.as_chunks::<4>().0) {
        *word = u32::from_le_bytes(*bytes);
    }
    let substitute = |word: u32| u32::from_le_bytes(word.to_le_bytes().map(|byte| substitution[usize::from(byte)]));
    let mut constant = 1;
    for at in NK..KEY_WORDS {
        let mut word = words[at - 1];
        if at % NK == 0 {
            word = substitute(word.rotate_right(8)) ^ u32::from(constant);
            constant = double(constant);
        } else if at % NK == 4 {
            word = substitute(word);
        }
        words[at] = words[at - NK] ^ word;
    }
    words
}

/// Returns the tables and round keys for a 32-byte key, in the layout that the kernels read.
pub fn tables(key: &[u8], direction: Direction) -> Zeroizing<Vec<u8>> {
    let (forward, inverse) = substitutions();
    let (substitution, factors) = match direction {
        Direction::Encrypt => (forward, [2, 1, 1, 3]),
        Direction::Decrypt => (inverse, [14, 9, 13, 11]),
    };
    let column = |byte: u8| u32::from_le_bytes(factors.map(|factor| multiply(byte, factor)));
    let mut keys = expand(key, &forward);
    if direction == Direction::Decrypt {
        // Decryption uses the round keys in reverse order, and applies the inverse MixColumns to the inner round keys.
        let mixed = |word: u32| {
            let columns = word.to_le_bytes().into_iter().zip([0, 8, 16, 24]);
            columns.fold(0, |sum, (byte, bits)| sum ^ column(byte).rotate_left(bits))
        };
        let forward_keys = keys.clone();
        for round in 0..=ROUNDS {
            for at in 0..4 {
                let word = forward_keys[4 * (ROUNDS - round) + at];
                let is_inner = round > 0 && round < ROUNDS;
                keys[4 * round + at] = if is_inner { mixed(word) } else { word };
            }
        }
    }
    let mut words = Vec::with_capacity(TABLE_BYTES / 4);
    for bits in [0, 8, 16, 24] {
        words.extend(substitution.iter().map(|byte| column(*byte).rotate_left(bits)));
    }
    words.extend(substitution.iter().map(|byte| u32::from(*byte)));
    words.extend_from_slice(&*keys);
    words.resize(TABLE_BYTES / 4, 0);
    let bytes = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    zeroize::Zeroize::zeroize(&mut words);
    Zeroizing::new(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use aes::cipher::{BlockDecrypt, BlockEncrypt, KeyInit};

    /// Transforms a block using the tables, as a kernel does.
    fn with_tables(tables: &[u8], direction: Direction, block: [u8; 16]) -> [u8; 16] {
        let word = |offset: usize| u32::from_le_bytes(tables[offset..offset + 4].try_into().expect("four bytes"));
        let key = |round: usize, at: usize| word(KEYS_OFFSET + 16 * round + 4 * at);
        let step = if direction == Direction::Encrypt { 1 } else { 3 };
        let mut state = [0u32; 4];
        for (at, bytes) in block.as_chunks::<4>().0.iter().enumerate() {
            state[at] = u32::from_le_bytes(*bytes) ^ key(0, at);
        }
        for round in 1..=ROUNDS {
            let before = state;
            for (at, out) in state.iter_mut().enumerate() {
                *out = key(round, at);
                for row in 0..4 {
                    let index = (before[(at + step * row) % 4] >> (8 * row) & 0xff) as usize;
                    *out ^= if round < ROUNDS {
                        word(0x400 * row + 4 * index)
                    } else {
                        word(LAST_ROUND_OFFSET + 4 * index) << (8 * row)
                    };
                }
            }
        }
        let mut out = [0; 16];
        for (bytes, word) in out.as_chunks_mut::<4>().0.iter_mut().zip(state) {
            *bytes = word.to_le_bytes();
        }
        out
    }

    #[test]
    fn tables_compute_aes_in_both_directions() {
        let mut random = fastrand::Rng::with_seed(5);
        for _ in 0..50 {
            let key: [u8; 32] = std::array::from_fn(|_| random.u8(..));
            let block: [u8; 16] = std::array::from_fn(|_| random.u8(..));
            let library = aes::Aes256::new(&key.into());
            let mut expected = block.into();
            library.encrypt_block(&mut expected);
            assert_eq!(with_tables(&tables(&key, Direction::Encrypt), Direction::Encrypt, block), expected.as_slice());
            let mut expected = block.into();
            library.decrypt_block(&mut expected);
            assert_eq!(with_tables(&tables(&key, Direction::Decrypt), Direction::Decrypt, block), expected.as_slice());
        }
    }
}
