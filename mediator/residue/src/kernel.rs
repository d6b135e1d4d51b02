//! The compute kernel that clears multiprocessors, and the methods that launch it.

use nvspec::addr::GpuVa;
use nvspec::chip::Chip;
use nvspec::class::compute90c0 as compute;
use nvspec::class::id::FERMI_COMPUTE_A;
use nvspec::fifo::{HeaderOp, MethodHeader, host_method};

/// Assembly source of the kernel.
const SOURCE: &str = include_str!("scrub.sm20");
/// Number of threads per block. Together, their registers fill a multiprocessor's register file.
const THREADS: u32 = 1024;
/// Number of registers per thread.
const REGISTERS: u32 = 32;
/// Maximum shared memory per multiprocessor in bytes.
const SHARED_BYTES: u32 = 48 << 10;
/// Subchannel on which drivers bind the compute class.
const SUBCHANNEL: u8 = 1;

/// The assembled kernel.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Machine code.
    pub code: Vec<u8>,
    entry: u32,
}

impl Kernel {
    /// Assembles the kernel.
    ///
    /// # Errors
    /// Returns an error if the source cannot be assembled, which is a bug.
    pub fn assemble() -> Result<Self, String> {
        let program = sm20::assemble(SOURCE).map_err(|errors| format!("{errors:?}"))?;
        let kernel = program.kernels.first().ok_or("the source contains no kernel")?;
        Ok(Self { code: program.bytes(), entry: kernel.entry_offset })
    }

    /// Returns the push buffer dwords that run the kernel at address `code` on all multiprocessors of a card.
    #[must_use]
    pub fn launch(&self, chip: &Chip, code: GpuVa) -> Vec<u32> {
        let blocks = chip.gpcs * chip.tpcs_per_gpc;
        let one = |high: u32, low: u32| high << 16 | low;
        let parts = [
            to(host_method::SET_OBJECT, &[FERMI_COMPUTE_A]),
            to(compute::CODE_ADDRESS_HIGH, &[(code.0 >> 32) as u32, code.0 as u32]),
            to(compute::PROGRAM_START, &[self.entry]),
            to(compute::STACK_SIZE, &[0x800]),
            to(compute::SHARED_SIZE, &[SHARED_BYTES]),
            to(compute::BLOCK_THREADS, &[THREADS]),
            to(compute::REGISTERS, &[REGISTERS]),
            to(compute::BLOCK_YX, &[one(1, THREADS), 1]),
            to(compute::GRID_YX, &[one(1, blocks), 1]),
            to(compute::LAUNCH, &[0]),
            to(compute::WAIT_FOR_IDLE, &[0]),
        ];
        parts.concat()
    }
}

/// Returns the push buffer dwords that write to consecutive methods.
fn to(method: u32, data: &[u32]) -> Vec<u32> {
    let header = MethodHeader::to(HeaderOp::Increasing, SUBCHANNEL, method, data.len() as u16);
    std::iter::once(header.into()).chain(data.iter().copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_has_a_whole_multiprocessor() {
        let kernel = Kernel::assemble().expect("the kernel does not assemble");
        assert!(!kernel.code.is_empty() && kernel.code.len() < 4096);
        assert_eq!(THREADS * REGISTERS, 32_768);
        let program = sm20::assemble(SOURCE).expect("the source does not assemble");
        assert_eq!((program.kernels[0].registers, program.kernels[0].shared_bytes), (REGISTERS, SHARED_BYTES));
    }
}
