//! Methods of the compute object: setup and launches.
//!
//! Like `push`, this module defines the methods independently of `nvspec`. Sources: envytools'
//! `rnndb/graph/gf100_compute.xml`, and the method order of Mesa's driver.

use super::push::{Object, Push};
use crate::{Error, Grid, Image, Params, Result};

/// Size of a warp's in-memory call and divergence stack, in bytes.
const STACK_BYTES: u32 = 0x800;
/// Maximum number of resident warps per multiprocessor.
const WARPS: u64 = 48;
/// Number of lanes per warp.
const LANES: u64 = 32;
/// Granularity of the local memory size in bytes.
const LOCAL_UNIT: u64 = 0x2_0000;
/// Start of the window in which a generic address refers to local memory.
const LOCAL_WINDOW: u32 = 0xff << 24;
/// Start of the window in which a generic address refers to shared memory.
const SHARED_WINDOW: u32 = 0xfe << 24;
/// Generic addresses that refer to local or shared memory.
pub const WINDOWS: std::ops::Range<u64> = (SHARED_WINDOW as u64)..(1 << 32);
/// Size of the parameters' constant buffer in bytes.
pub const BANK_BYTES: u32 = 0x1000;
/// Offset of the parameters in the constant buffer.
const PARAMS_AT: u32 = 0x20;
/// Maximum size of a kernel's parameters in bytes.
const MAX_PARAMS_BYTES: u32 = BANK_BYTES - PARAMS_AT;
/// Maximum grid dimension in blocks. The method has 16 bits.
const MAX_BLOCKS: u32 = 0xffff;

/// Returns the size of the local memory and stacks in bytes, for a card with `multiprocessors` multiprocessors and
/// kernels with `local_bytes` bytes of local memory per thread.
#[must_use]
pub fn local_area(multiprocessors: u64, local_bytes: u32) -> u64 {
    let warp = u64::from(STACK_BYTES) + u64::from(local_bytes).next_multiple_of(16) * LANES;
    (warp * WARPS * multiprocessors).next_multiple_of(LOCAL_UNIT)
}

/// A memory area for local memory.
#[derive(Debug, Clone, Copy)]
pub struct Area {
    /// GPU virtual address.
    pub address: u64,
    /// Size in bytes.
    pub bytes: u64,
}

/// A kernel and its code.
#[derive(Debug, Clone, Copy)]
pub struct Code<'a> {
    /// GPU virtual address of the program.
    pub address: u64,
    /// The kernel to launch.
    pub kernel: &'a sm20::Kernel,
}

/// Returns the image's program for Fermi cards. `device` is the backend's name for error messages.
///
/// # Errors
/// Returns an error if the image is for another card type, or if a kernel's parameters are too large.
pub fn program<'a>(image: Image<'a>, device: &str) -> Result<&'a sm20::Program> {
    let Image::Sm20(program) = image else {
        return Err(Error::Image(format!("{device} loads programs for sm_20, neither PTX nor cubins")));
    };
    if let Some(kernel) = program.kernels.iter().find(|kernel| kernel.params > MAX_PARAMS_BYTES) {
        let (name, bytes) = (&kernel.name, kernel.params);
        return Err(Error::Image(format!(
            "kernel {name:?} has {bytes} bytes of parameters, at most {MAX_PARAMS_BYTES}"
        )));
    }
    Ok(program)
}

/// Looks up a kernel, and checks that it can be launched with this grid and these parameters.
///
/// # Errors
/// Returns an error if the kernel does not exist, the grid exceeds the limits, or the parameters have the wrong size.
pub fn kernel<'a>(program: &'a sm20::Program, name: &str, grid: Grid, params: &Params) -> Result<&'a sm20::Kernel> {
    if grid.blocks.iter().any(|blocks| *blocks > MAX_BLOCKS) {
        return Err(Error::Grid { blocks: grid.blocks, threads: grid.threads });
    }
    let kernel = program.kernel(name).ok_or_else(|| Error::Kernel(name.to_owned()))?;
    let (expected, given) = (u64::from(kernel.params), params.bytes().len() as u64);
    if given != expected {
        return Err(Error::Parameters { kernel: name.to_owned(), expected, given });
    }
    Ok(kernel)
}

fn set(push: &mut Push, method: u32, data: &[u32]) {
    push.methods(Object::COMPUTE.subchannel, method, data);
}

fn high(address: u64) -> u32 {
    (address >> 32) as u32
}

/// Sets the state shared by all launches: windows, an identity map of global addresses, and constant bank 0.
pub fn set_up(push: &mut Push, multiprocessors: u32, bank: u64) {
    // Set the multiprocessor limit, the call depth limit, and method 0x2a0, as Mesa does.
    set(push, 0x0758, &[multiprocessors]);
    set(push, 0x0d64, &[0xf]);
    set(push, 0x02a0, &[0x8000]);
    set(push, 0x02c4, &[0]);
    for upper in 0..=0xff {
        // Map each address to itself, readable and writable.
        set(push, 0x02c8, &[0xc << 28 | upper << 16 | upper]);
    }
    set(push, 0x02c4, &[1]);
    set(push, 0x077c, &[LOCAL_WINDOW]);
    set(push, 0x0214, &[SHARED_WINDOW]);
    select_bank(push, bank);
    // Bind bank 0 as valid.
    set(push, 0x1694, &[1]);
}

/// Sets the address and size of local memory for later launches.
pub fn set_local(push: &mut Push, area: Area) {
    set(push, 0x0790, &[high(area.address), area.address as u32, high(area.bytes), area.bytes as u32]);
}

fn select_bank(push: &mut Push, bank: u64) {
    set(push, 0x2380, &[BANK_BYTES, high(bank), bank as u32]);
}

/// Stores a timestamp with `payload` once all earlier work has completed.
pub fn stamp(push: &mut Push, address: u64, payload: u32) {
    // The release writes four 32-bit words.
    set(push, 0x1b00, &[high(address), address as u32, payload, 0]);
}

/// Waits until all earlier grids have completed. This orders M2MF copies after the grids.
pub fn wait_for_idle(push: &mut Push) {
    push.immediate(Object::COMPUTE.subchannel, 0x0110, 0);
}

/// Launches a grid. Methods load the parameters, so that earlier grids still see their own parameters.
pub fn launch(push: &mut Push, code: Code<'_>, grid: Grid, params: &Params, bank: u64) {
    let Code { address, kernel } = code;
    select_bank(push, bank);
    let words: Vec<u32> = params.bytes().as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
    for (index, words) in (0..).zip(words.chunks(16)) {
        // Send the offset, followed by up to sixteen data words.
        let mut row = vec![PARAMS_AT + 64 * index];
        row.extend_from_slice(words);
        set(push, 0x238c, &row);
    }
    // Flush code, global memory and constants.
    push.immediate(Object::COMPUTE.subchannel, 0x1698, 0x1011);
    set(push, 0x1608, &[high(address), address as u32]);
    set(push, 0x03b4, &[kernel.entry_offset]);
    // Set the sizes of lower and upper local memory, and of the stack.
    set(push, 0x0204, &[kernel.local_bytes.next_multiple_of(16), 0, STACK_BYTES]);
    set(push, 0x02c0, &[kernel.registers.max(4)]);
    let [x, y, z] = grid.threads;
    set(push, 0x024c, &[kernel.shared_bytes, x * y * z, kernel.barriers]);
    set(push, 0x03ac, &[y << 16 | x, z]);
    let [x, y, z] = grid.blocks;
    set(push, 0x0238, &[y << 16 | x, z]);
    set(push, 0x029c, &[0]);
    set(push, 0x0368, &[0x1000]);
    set(push, 0x0a04, &[0]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_parameters_are_written_in_blocks_of_16_words() {
        let program = sm20::assemble(".kernel k\n.params 72\nEXIT").expect("a program");
        let code = Code { address: 0x1_2345_6000, kernel: program.kernel("k").expect("k") };
        let params = (0..18).fold(Params::new(), Params::word);
        let mut push = Push::default();
        launch(&mut push, code, Grid::line(1, 32), &params, 0x7_0000_1000);
        let words = push.words();
        assert_eq!(words[..4], [0x2003_28e0, BANK_BYTES, 7, 0x1000]);
        assert_eq!(words[4..7], [0x2011_28e3, 0x20, 0]);
        assert_eq!(words[22..26], [0x2003_28e3, 0x60, 16, 17]);
        assert_eq!(words[27..30], [0x2002_2582, 1, 0x2345_6000]);
    }

    #[test]
    fn local_memory_has_room_for_all_warps() {
        assert_eq!(local_area(1, 0), 0x2_0000);
        // 14 * 48 warps, each with a stack and 32 lanes of 112 bytes, need 29 units.
        assert_eq!(local_area(14, 100), 29 * 0x2_0000);
    }
}
