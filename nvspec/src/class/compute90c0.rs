//! Class 0x90c0: compute.
//!
//! Methods set the state of a grid before its launch. There is no descriptor in memory.
//!
//! Source: NVIDIA's class header, rnndb `graph/gf100_compute.xml`, and Mesa.

use crate::Field;

/// No operation.
pub const NO_OPERATION: u32 = 0x100;
/// Waits for earlier work to complete.
#[doc(alias = "SERIALIZE")]
pub const WAIT_FOR_IDLE: u32 = 0x110;
/// Makes the front end go idle.
pub const SEND_GO_IDLE: u32 = 0x13c;
/// Triggers the performance counters.
pub const PM_TRIGGER: u32 = 0x140;
/// Header of the instrumentation method.
pub const INSTRUMENTATION_HEADER: u32 = 0x150;
/// Data of the instrumentation method.
pub const INSTRUMENTATION_DATA: u32 = 0x154;
/// Size in bytes of a thread's local memory from address 0 upwards.
#[doc(alias = "LOCAL_POS_ALLOC")]
pub const LOCAL_LOW_SIZE: u32 = 0x204;
/// Size in bytes of a thread's local memory below address 2^24.
#[doc(alias = "LOCAL_NEG_ALLOC")]
pub const LOCAL_HIGH_SIZE: u32 = 0x208;
/// Size in bytes of a warp's call and divergence stack in memory.
#[doc(alias = "WARP_CSTACK_SIZE")]
pub const STACK_SIZE: u32 = 0x20c;
/// Generic address of the shared memory window.
#[doc(alias = "SHARED_BASE")]
pub const SHARED_WINDOW: u32 = 0x214;
/// Waits, and invalidates or flushes caches.
#[doc(alias = "MEM_BARRIER")]
pub const INVALIDATE_SHADER_CACHES: u32 = 0x21c;
/// Grid dimensions in blocks: x in the low half, y in the high half.
#[doc(alias = "GRIDDIM_YX")]
pub const GRID_YX: u32 = 0x238;
/// Grid dimension z in blocks.
#[doc(alias = "GRIDDIM_Z")]
pub const GRID_Z: u32 = 0x23c;
/// Shared memory per block in bytes.
pub const SHARED_SIZE: u32 = 0x24c;
/// Number of threads per block.
#[doc(alias = "THREADS_ALLOC")]
pub const BLOCK_THREADS: u32 = 0x250;
/// Number of barriers per block.
#[doc(alias = "BARRIER_ALLOC")]
pub const BLOCK_BARRIERS: u32 = 0x254;
/// Checks that the object is of a compute class, which is always true for this class.
pub const TEST_FOR_COMPUTE: u32 = 0x28c;
/// Begins a grid.
pub const BEGIN_GRID: u32 = 0x29c;
/// Number of registers per thread.
#[doc(alias = "CP_GPR_ALLOC")]
pub const REGISTERS: u32 = 0x2c0;
/// Enables the table that [`GLOBAL_MAP_ENTRY`] sets.
pub const GLOBAL_MAP_MODE: u32 = 0x2c4;
/// Sets an entry of the table that maps the upper byte of global addresses. See [`global_map`].
#[doc(alias = "GLOBAL_BASE")]
pub const GLOBAL_MAP_ENTRY: u32 = 0x2c8;
/// Launches the grid. SR_CTAPARAM returns the method's data.
pub const LAUNCH: u32 = 0x368;
/// Block dimensions in threads: x in the low half, y in the high half.
#[doc(alias = "BLOCKDIM_YX")]
pub const BLOCK_YX: u32 = 0x3ac;
/// Block dimension z in threads.
#[doc(alias = "BLOCKDIM_Z")]
pub const BLOCK_Z: u32 = 0x3b0;
/// Byte offset of the first instruction in the code segment.
#[doc(alias = "CP_START_ID")]
pub const PROGRAM_START: u32 = 0x3b4;
/// Generic address of the local memory window.
#[doc(alias = "LOCAL_BASE")]
pub const LOCAL_WINDOW: u32 = 0x77c;
/// Value that SR_GRIDPARAM returns.
#[doc(alias = "GRIDID")]
pub const GRID_PARAM: u32 = 0x780;
/// Address of the memory that backs local memory, bits 39:32.
#[doc(alias = "TEMP_ADDRESS_HIGH")]
pub const LOCAL_ADDRESS_HIGH: u32 = 0x790;
/// Address of the memory that backs local memory, bits 31:0.
#[doc(alias = "TEMP_ADDRESS_LOW")]
pub const LOCAL_ADDRESS_LOW: u32 = 0x794;
/// Size of local memory in bytes, bits 39:32.
#[doc(alias = "TEMP_SIZE_HIGH")]
pub const LOCAL_SIZE_HIGH: u32 = 0x798;
/// Size of local memory in bytes, bits 31:0.
#[doc(alias = "TEMP_SIZE_LOW")]
pub const LOCAL_SIZE_LOW: u32 = 0x79c;
/// Ends a grid.
pub const END_GRID: u32 = 0xa04;
/// Render condition mode. See [`cond_mode`](crate::class::m2mf9039::cond_mode).
pub const COND_MODE: u32 = 0x1558;
/// Code segment address, bits 39:32.
pub const CODE_ADDRESS_HIGH: u32 = 0x1608;
/// Code segment address, bits 31:0.
pub const CODE_ADDRESS_LOW: u32 = 0x160c;
/// Binds the selected constant buffer to a bank. See [`bind`].
#[doc(alias = "CB_BIND")]
pub const CONSTANT_BIND: u32 = 0x1694;
/// Invalidates caches without waiting.
#[doc(alias = "FLUSH")]
pub const INVALIDATE_SHADER_CACHES_NO_WAIT: u32 = 0x1698;
/// Invalidates the constant cache.
pub const INVALIDATE_CONSTANTS: u32 = 0x1930;
/// Overrides the render condition. See [`render_override`](crate::class::m2mf9039::render_override).
pub const RENDER_ENABLE_OVERRIDE: u32 = 0x1944;
/// No operation in the pipeline.
pub const PIPE_NOP: u32 = 0x1a2c;
/// Semaphore address, bits 39:32.
#[doc(alias = "QUERY_ADDRESS_HIGH")]
pub const SEMAPHORE_ADDRESS_HIGH: u32 = 0x1b00;
/// Semaphore address, bits 31:0.
#[doc(alias = "QUERY_ADDRESS_LOW")]
pub const SEMAPHORE_ADDRESS_LOW: u32 = 0x1b04;
/// Semaphore payload.
#[doc(alias = "QUERY_SEQUENCE")]
pub const SEMAPHORE_PAYLOAD: u32 = 0x1b08;
/// Releases the semaphore once earlier work has completed. See [`semaphore`].
#[doc(alias = "QUERY_GET")]
pub const SEMAPHORE_EXECUTE: u32 = 0x1b0c;
/// Size of the selected constant buffer in bytes.
#[doc(alias = "CB_SIZE")]
pub const CONSTANT_SIZE: u32 = 0x2380;
/// Selected constant buffer's address, bits 39:32.
#[doc(alias = "CB_ADDRESS_HIGH")]
pub const CONSTANT_ADDRESS_HIGH: u32 = 0x2384;
/// Selected constant buffer's address, bits 31:0.
#[doc(alias = "CB_ADDRESS_LOW")]
pub const CONSTANT_ADDRESS_LOW: u32 = 0x2388;
/// Offset of the next dword to store in the selected constant buffer, in bytes.
#[doc(alias = "CB_POS")]
pub const CONSTANT_OFFSET: u32 = 0x238c;
/// First of sixteen methods that store a dword in the selected constant buffer and advance the offset.
#[doc(alias = "CB_DATA")]
pub const CONSTANT_DATA: u32 = 0x2390;
/// Last of the methods that start at [`CONSTANT_DATA`].
pub const CONSTANT_DATA_LAST: u32 = 0x23cc;

/// Fields of [`CONSTANT_BIND`].
pub mod bind {
    use super::Field;
    /// Set if a buffer is bound to the bank.
    pub const VALID: Field = Field::new(0, 0);
    /// Bank number.
    pub const BANK: Field = Field::new(12, 8);
}

/// Fields of [`GLOBAL_MAP_ENTRY`].
pub mod global_map {
    use super::Field;
    /// Bits 39:32 of the GPU virtual address.
    pub const VIRTUAL_UPPER: Field = Field::new(7, 0);
    /// Bits 39:32 of the global address, which are the index of the entry.
    pub const GLOBAL_UPPER: Field = Field::new(23, 16);
    /// Set if loads are permitted.
    pub const READ: Field = Field::new(30, 30);
    /// Set if stores are permitted.
    pub const WRITE: Field = Field::new(31, 31);
}

/// Fields of [`SEMAPHORE_EXECUTE`].
pub mod semaphore {
    use super::Field;
    /// Operation. 0 is a release.
    pub const OPERATION: Field = Field::new(1, 0);
    /// Value of [`OPERATION`] that releases the semaphore.
    pub const RELEASE: u32 = 0;
    /// Skips the memory flush before the release. The software card ignores it.
    pub const FLUSH_DISABLE: Field = Field::new(2, 2);
    /// Applies the payload to memory as a reduction instead of storing it.
    pub const REDUCTION: Field = Field::new(3, 3);
    /// Raises the non-stall interrupt after the release.
    pub const AWAKEN: Field = Field::new(20, 20);
    /// Set if the semaphore is one dword instead of four.
    pub const ONE_WORD: Field = Field::new(28, 28);
    /// Mask of the modelled bits.
    pub const MASK: u32 = OPERATION.mask() | FLUSH_DISABLE.mask() | AWAKEN.mask() | ONE_WORD.mask();
}

/// Launch limits.
pub mod limit {
    /// Number of constant banks.
    pub const CONSTANT_BANKS: u32 = 18;
    /// Maximum size of a constant buffer in bytes.
    pub const CONSTANT_BYTES: u32 = 0x1_0000;
    /// Maximum number of threads per block.
    pub const BLOCK_THREADS: u32 = 1024;
    /// Maximum block dimension in x and y.
    pub const BLOCK_XY: u32 = 1024;
    /// Maximum block dimension in z.
    pub const BLOCK_Z: u32 = 64;
    /// Maximum number of registers per thread, excluding RZ.
    pub const REGISTERS: u32 = 63;
    /// Number of registers per multiprocessor.
    pub const SM_REGISTERS: u32 = 0x8000;
    /// Maximum number of warps per multiprocessor.
    pub const SM_WARPS: u32 = 48;
    /// Maximum shared memory per block in bytes.
    pub const SHARED_BYTES: u32 = 0xc000;
    /// Maximum local memory per thread in bytes, low and high parts combined.
    pub const LOCAL_BYTES: u32 = 512 << 10;
    /// Maximum number of barriers per block.
    pub const BARRIERS: u32 = 16;
    /// Number of shared memory banks.
    pub const SHARED_BANKS: u32 = 32;
}

/// Size in bytes of each of the two windows in the generic address space.
pub const WINDOW_BYTES: u64 = 1 << 24;

/// Number of bits in a local memory address.
pub const LOCAL_ADDRESS_BITS: u32 = 24;

/// Values of a multiprocessor's warp error register. Source: nouveau's table of warp errors.
pub mod warp_error {
    /// The call and divergence stack overflowed.
    pub const STACK: u32 = 0x01;
    /// A return, break or continue instruction found no stack entry.
    pub const EMPTY_STACK: u32 = 0x03;
    /// Misaligned program counter.
    pub const MISALIGNED_PC: u32 = 0x05;
    /// The program counter is outside the code segment's address range.
    pub const PC_OVERFLOW: u32 = 0x06;
    /// Misaligned constant address.
    pub const MISALIGNED_CONSTANT: u32 = 0x07;
    /// Misaligned register pair or quad.
    pub const MISALIGNED_REGISTER: u32 = 0x08;
    /// Invalid instruction.
    pub const ILLEGAL_ENCODING: u32 = 0x09;
    /// Invalid operand.
    pub const ILLEGAL_PARAMETER: u32 = 0x0b;
    /// A constant is outside its bank.
    pub const CONSTANT_ADDRESS: u32 = 0x0c;
    /// A register number exceeds the number of registers that the program declares.
    pub const OUT_OF_RANGE_REGISTER: u32 = 0x0d;
    /// An address is outside local or shared memory.
    pub const OUT_OF_RANGE_ADDRESS: u32 = 0x0e;
    /// Misaligned address.
    pub const MISALIGNED_ADDRESS: u32 = 0x0f;
    /// The operation is not valid for the address space of its address.
    pub const ADDRESS_SPACE: u32 = 0x10;
    /// An LDC access is outside the constant bank.
    pub const CONSTANT_ADDRESS_LDC: u32 = 0x12;
    /// Diverged lanes executed an instruction that requires all lanes.
    pub const DIVERGENT: u32 = 0x14;
}

/// Consecutive methods that each keep their last data dword as state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateMethods {
    /// First method.
    pub first: u32,
    /// Number of methods.
    pub count: u32,
    /// Mask of valid data bits.
    pub mask: u32,
}

const fn one(first: u32, mask: u32) -> StateMethods {
    StateMethods { first, count: 1, mask }
}

const fn row(first: u32, count: u32) -> StateMethods {
    StateMethods { first, count, mask: u32::MAX }
}

/// All methods whose data is kept as state, in ascending order. Methods without a name in this module do not affect the
/// execution of grids. They configure textures, surfaces, caches, work distribution and performance counters, or are
/// spare or firmware methods.
pub const STATE: &[StateMethods] = &[
    row(INSTRUMENTATION_HEADER, 2),
    one(LOCAL_LOW_SIZE, 0xff_ffff),
    one(LOCAL_HIGH_SIZE, 0xff_ffff),
    one(STACK_SIZE, 0x1f_ffff),
    one(0x210, 0xff),
    one(SHARED_WINDOW, u32::MAX),
    row(0x228, 4),
    one(GRID_YX, u32::MAX),
    one(GRID_Z, 0xffff),
    one(SHARED_SIZE, 0x3_ffff),
    one(BLOCK_THREADS, 0xffff),
    one(BLOCK_BARRIERS, 0xff),
    one(0x2a0, 0x1_fff0),
    one(REGISTERS, 0xff),
    one(GLOBAL_MAP_MODE, 1),
    one(0x308, 7),
    one(0x30c, 1),
    one(0x36c, 3),
    one(BLOCK_YX, u32::MAX),
    one(BLOCK_Z, 0xffff),
    one(PROGRAM_START, u32::MAX),
    row(0x500, 32),
    one(0x758, 0xffff),
    one(LOCAL_WINDOW, u32::MAX),
    one(GRID_PARAM, u32::MAX),
    one(LOCAL_ADDRESS_HIGH, 0xff),
    one(LOCAL_ADDRESS_LOW, u32::MAX),
    one(LOCAL_SIZE_HIGH, 0xff),
    one(LOCAL_SIZE_LOW, u32::MAX),
    one(0x7a0, u32::MAX),
    one(0xa08, u32::MAX),
    one(0xd64, 0xf),
    one(0xd94, u32::MAX),
    one(0xde4, u32::MAX),
    row(0xf44, 4),
    one(0x1004, u32::MAX),
    row(0x1040, 12),
    one(0x1234, u32::MAX),
    one(0x12ac, u32::MAX),
    one(0x1354, u32::MAX),
    row(0x1524, 2),
    one(0x1550, 0xff),
    one(0x1554, u32::MAX),
    one(COND_MODE, 7),
    row(0x155c, 3),
    row(0x1574, 3),
    one(CODE_ADDRESS_HIGH, 0xff),
    one(CODE_ADDRESS_LOW, u32::MAX),
    one(0x1664, u32::MAX),
    one(0x1690, u32::MAX),
    one(RENDER_ENABLE_OVERRIDE, 3),
    row(0x1a30, 4),
    one(SEMAPHORE_ADDRESS_HIGH, 0xff),
    one(SEMAPHORE_ADDRESS_LOW, u32::MAX),
    one(SEMAPHORE_PAYLOAD, u32::MAX),
    one(CONSTANT_SIZE, 0x1_ffff),
    one(CONSTANT_ADDRESS_HIGH, 0xff),
    one(CONSTANT_ADDRESS_LOW, u32::MAX),
    one(CONSTANT_OFFSET, 0xffff),
    row(0x2700, 6),
    row(0x2720, 6),
    row(0x2740, 6),
    row(0x2760, 6),
    row(0x2780, 6),
    row(0x27a0, 6),
    row(0x27c0, 6),
    row(0x27e0, 6),
    row(0x335c, 33),
];

/// Number of state dwords.
pub const STATE_WORDS: usize = {
    let (mut index, mut words) = (0, 0);
    while index < STATE.len() {
        words += STATE[index].count as usize;
        index += 1;
    }
    words
};

/// Returns the index of the state dword that a method sets and the mask of its valid bits, or `None` for a method
/// without state.
#[must_use]
pub const fn state_word(method: u32) -> Option<(usize, u32)> {
    let (mut index, mut words) = (0, 0);
    while index < STATE.len() {
        let StateMethods { first, count, mask } = STATE[index];
        if method < first {
            return None;
        }
        if (method - first) / 4 < count && method.is_multiple_of(4) {
            return Some((words + ((method - first) / 4) as usize, mask));
        }
        words += count as usize;
        index += 1;
    }
    None
}

/// Returns true if a method exists but has no effect here. These methods wait for earlier work, as the engine does for
/// every method, or control caches and texture units.
#[must_use]
pub const fn is_without_effect(method: u32) -> bool {
    matches!(
        method,
        NO_OPERATION
            | WAIT_FOR_IDLE
            | SEND_GO_IDLE
            | PM_TRIGGER
            | TEST_FOR_COMPUTE
            | BEGIN_GRID
            | END_GRID
            | PIPE_NOP
            | INVALIDATE_SHADER_CACHES
            | INVALIDATE_SHADER_CACHES_NO_WAIT
            | INVALIDATE_CONSTANTS
            // Texture and sampler cache control, reference counts and unbinding.
            | 0x244
            | 0x360
            | 0x10f4
            | 0x1288
            | 0x1330
            | 0x1334
            | 0x1338
            | 0x1424
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_methods_ascend_and_are_found() {
        assert!(STATE.windows(2).all(|pair| pair[0].first + 4 * pair[0].count <= pair[1].first));
        let mut next = 0;
        for method in (0..0x4000).step_by(4) {
            if let Some((index, _)) = state_word(method) {
                assert_eq!(index, next, "{method:#x}");
                next += 1;
                assert!(!is_without_effect(method), "{method:#x}");
            }
        }
        assert_eq!(next, STATE_WORDS);
        assert_eq!(state_word(CODE_ADDRESS_LOW + 1), None);
    }
}
