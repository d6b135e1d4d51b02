//! The kernels of `madd` and `mmul` as graph nodes. The caller manages the buffers and the order.

use crate::{Buffer, Grid, Params, Random};
use anyhow::Result;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Number of rows and columns of a tile in `mmul`.
const TILE: u32 = 16;

/// Function of a node with two square matrices of words as inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeKernel {
    /// The sum of the matrices.
    Madd,
    /// The product of the matrices.
    Mmul,
}

impl NodeKernel {
    /// Returns the function called `name`, if it exists.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        [Self::Madd, Self::Mmul].into_iter().find(|kernel| kernel.name() == name)
    }

    /// Returns the name of the function, which is also the name of its kernel in the program.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Madd => "madd",
            Self::Mmul => "mmul",
        }
    }

    /// Returns the function's program.
    ///
    /// # Errors
    /// Returns an error if the program does not assemble.
    pub fn program(self) -> Result<sm20::Program> {
        crate::assemble(match self {
            Self::Madd => include_str!("kernels/madd.sm20"),
            Self::Mmul => include_str!("kernels/mmul.sm20"),
        })
    }

    /// Returns the parameters and the grid that compute c from a and b, for matrices of `side` rows. `side` must be a
    /// multiple of 16.
    #[must_use]
    pub fn launch(self, side: u32, a: Buffer, b: Buffer, c: Buffer) -> (Params, Grid) {
        match self {
            Self::Madd => {
                let count = side * side;
                (Params::new().word(count).word(1).buffer(a).buffer(b).buffer(c), Grid::line(count, 256))
            }
            Self::Mmul => {
                let params = Params::new().word(side).buffer(a).buffer(b).buffer(c);
                (params, Grid::plane([side / TILE; 2], [TILE; 2]))
            }
        }
    }

    /// Computes the same result on the CPU.
    #[must_use]
    pub fn on_the_cpu(self, side: u32, a: &[u32], b: &[u32]) -> Vec<u32> {
        let side = side as usize;
        match self {
            Self::Madd => a.iter().zip(b).map(|(a, b)| a.wrapping_add(*b)).collect(),
            Self::Mmul => {
                let element = |at: usize| {
                    let column = b[at % side..].iter().step_by(side);
                    let products = a[at / side * side..][..side].iter().zip(column);
                    products.fold(0u32, |sum, (a, b)| sum.wrapping_add(a.wrapping_mul(*b)))
                };
                (0..side * side).map(element).collect()
            }
        }
    }
}

/// Measures the duration of a fixed computation on the CPU, to compare CPUs.
#[must_use]
pub fn yardstick() -> Duration {
    const SIDE: u32 = 128;
    let mut random = Random::new(1);
    let [a, b] = [(); 2].map(|()| random.words((SIDE * SIDE) as usize));
    let began = Instant::now();
    black_box(NodeKernel::Mmul.on_the_cpu(SIDE, black_box(&a), black_box(&b)));
    began.elapsed()
}
