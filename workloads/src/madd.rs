//! Integer matrix addition.

use crate::{Buffer, Gpu, Grid, Params, Place, Random, Workload, compare_words};
use anyhow::{Context, Result};

/// c = a + b.
#[derive(Debug)]
pub(crate) struct Madd {
    side: u32,
    a: Vec<u32>,
    b: Vec<u32>,
    c: Vec<u32>,
    device: Option<(crate::Module, [Buffer; 3])>,
}

impl Madd {
    pub(crate) fn new(scale: u32, seed: u64) -> Self {
        let side = 64 * scale.isqrt().max(1);
        let (count, mut random) = ((side * side) as usize, Random::new(seed));
        Self { side, a: random.words(count), b: random.words(count), c: vec![0; count], device: None }
    }
}

impl Workload for Madd {
    fn name(&self) -> &'static str {
        "madd"
    }

    fn size(&self) -> String {
        format!("{0}x{0}", self.side)
    }

    fn init(&mut self, gpu: &mut dyn Gpu) -> Result<()> {
        let program = crate::assemble(include_str!("kernels/madd.sm20"))?;
        let module = gpu.load(&program)?;
        let bytes = size_of_val(&*self.a) as u64;
        let mut buffer = || gpu.allocate(Place::Vram, bytes);
        self.device = Some((module, [buffer()?, buffer()?, buffer()?]));
        Ok(())
    }

    fn upload(&mut self, gpu: &mut dyn Gpu) -> Result<()> {
        let (_, [a, b, _]) = self.device.context("not initialised")?;
        gpu.upload(a, 0, &crate::words_to_bytes(&self.a))?;
        gpu.upload(b, 0, &crate::words_to_bytes(&self.b))
    }

    fn launch(&mut self, gpu: &mut dyn Gpu) -> Result<()> {
        let (module, [a, b, c]) = self.device.context("not initialised")?;
        let count = self.side * self.side;
        let params = Params::new().word(count).buffer(a).buffer(b).buffer(c);
        gpu.launch(module, "madd", Grid::line(count, 256), &params, &[a, b, c])
    }

    fn download(&mut self, gpu: &mut dyn Gpu) -> Result<()> {
        let (_, [_, _, c]) = self.device.context("not initialised")?;
        let mut bytes = vec![0; size_of_val(&*self.c)];
        gpu.download(c, 0, &mut bytes)?;
        self.c = crate::bytes_to_words(&bytes);
        Ok(())
    }

    fn check(&self) -> Result<u64> {
        let expected: Vec<u32> = self.a.iter().zip(&self.b).map(|(a, b)| a.wrapping_add(*b)).collect();
        compare_words("c", &self.c, &expected)
    }
}
