//! AES-XTS on the card.

use std::collections::HashMap;

use aes::Aes256;
use aes::cipher::{BlockEncrypt, KeyInit};
use anyhow::{Context as _, Result, ensure};
use gdev::{Context, Grid, Image, Memory, Module, Params, Place, Target};

use crate::SECTOR_BYTES;
use crate::kernel::{BLOCK_BYTES, Language, THREADS, source};
use crate::key::Key;
use crate::tables::{Direction, TABLE_BYTES, tables};

/// Maximum number of bytes transformed per launch.
const PIECE_BYTES: usize = 4 << 20;

/// A context with the kernels, the key's tables, and buffers for one launch.
pub struct Card {
    context: Context,
    module: Module,
    tables: HashMap<Direction, Memory>,
    data: Memory,
    tweaks: Memory,
    /// Key that encrypts sector numbers.
    tweak_key: Aes256,
}

impl Card {
    /// Opens a device, and loads the kernels and the key's tables.
    ///
    /// # Errors
    /// Returns an error if the device cannot be opened, or on a driver error.
    pub fn open(target: &Target, key: &Key) -> Result<Self> {
        let mut context = gdev::open(target)?;
        let module = match target {
            Target::Cuda(_) => context.load(Image::Cuda(source(Language::Ptx).as_bytes()))?,
            Target::Nouveau(_) | Target::Vgpu(_) => {
                let program = sm20::read(source(Language::Sm20).as_bytes()).map_err(anyhow::Error::msg)?;
                context.load(Image::Sm20(&program))?
            }
        };
        let mut tables_of = HashMap::new();
        for direction in Direction::ALL {
            let memory = context.allocate(Place::Vram, TABLE_BYTES as u64)?;
            context.write(memory, 0, &tables(key.data(), direction))?;
            tables_of.insert(direction, memory);
        }
        let data = context.allocate(Place::Vram, PIECE_BYTES as u64)?;
        let tweaks = context.allocate(Place::Vram, (PIECE_BYTES / SECTOR_BYTES * BLOCK_BYTES) as u64)?;
        let tweak_key = Aes256::new_from_slice(key.tweak()).context("the key")?;
        Ok(Self { context, module, tables: tables_of, data, tweaks, tweak_key })
    }

    /// Transforms data in place. The first sector has number `sector`. The data is undefined after an error.
    ///
    /// # Errors
    /// Returns an error if the card lost work, or on a driver error.
    pub fn run(&mut self, direction: Direction, sector: u64, data: &mut [u8]) -> Result<()> {
        ensure!(data.len().is_multiple_of(SECTOR_BYTES), "{} bytes are not whole sectors", data.len());
        for (sector, piece) in (sector..).step_by(PIECE_BYTES / SECTOR_BYTES).zip(data.chunks_mut(PIECE_BYTES)) {
            let count = piece.len() / SECTOR_BYTES;
            let mut tweaks = Vec::with_capacity(count * BLOCK_BYTES);
            for number in (sector..).take(count) {
                let mut block = u128::from(number).to_le_bytes().into();
                self.tweak_key.encrypt_block(&mut block);
                tweaks.extend_from_slice(&block);
            }
            self.context.write(self.data, 0, piece)?;
            self.context.write(self.tweaks, 0, &tweaks)?;
            let table = self.tables.get(&direction).copied().context("the tables")?;
            let blocks = (piece.len() / BLOCK_BYTES) as u32;
            let params = Params::new().buffer(self.data).buffer(table).buffer(self.tweaks).word(blocks);
            let uses = [self.data, table, self.tweaks];
            self.context.launch(self.module, direction.name(), Grid::line(blocks, THREADS), &params, &uses)?;
            self.context.read(self.data, 0, piece)?;
        }
        Ok(())
    }
}
