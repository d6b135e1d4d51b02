//! Initial inputs for the fuzz target, by name: hand-written life cycles of address spaces. The first number of an
//! operation selects the operation, and the others are its operands, as `Machine::step` reads them.

use crate::model::machine::OP_BYTES;
use std::collections::BTreeMap;

/// Operations; the rest of each operation is zero.
type Ops<'a> = &'a [&'a [u8]];

/// Mode byte of all seeds: the default mode with a high table limit. The test runs the seeds in each mode.
const MODE: u8 = 3;

/// The first directory's first entry names an eighth of a large and of a small table.
const TABLES: &[u8] = &[0, 0, 0, 0x13, 0, 1];
/// The small table's entries 0 to 7 become VRAM pages 0x40 to 0x47, and entry 8 RAM that is granted.
const SMALL: Ops<'_> = &[&[7, 1, 0, 6, 0x40], &[7, 1, 1, 7, 0x41], &[7, 1, 7, 8, 0x47], &[7, 1, 8, 11, 0x14]];
/// The large table's entries: VRAM, a table's page, contiguous RAM.
const LARGE: Ops<'_> = &[&[8, 0, 1, 9, 3], &[8, 0, 2, 10, 1], &[8, 0, 3, 13, 2], &[8, 0, 4, 13, 4]];
const FLUSH_IDLE: &[u8] = &[16, 0, 0, 0];
const FLUSH_BUSY: &[u8] = &[17, 0, 1, 0];
const PREPARE: &[u8] = &[20, 0];

fn encode(parts: &[Ops<'_>]) -> Vec<u8> {
    let mut out = vec![MODE];
    for op in parts.concat() {
        let mut bytes = [0; OP_BYTES];
        bytes[..op.len()].copy_from_slice(op);
        out.extend(bytes);
    }
    out
}

/// Returns the inputs. Each input begins with tables, entries of both sizes, and their shadow.
pub(super) fn seeds() -> BTreeMap<&'static str, Vec<u8>> {
    let seed = |rest: Ops<'_>| encode(&[&[TABLES], SMALL, LARGE, &[PREPARE], rest]);
    BTreeMap::from([
        // Pages are mapped, unmapped and remapped read-only, with each kind of flush.
        (
            "unmap",
            seed(&[&[7, 1, 0], FLUSH_IDLE, &[8, 0, 1], FLUSH_BUSY, &[7, 1, 1, 0x36, 0x41], &[18, 0, 32], &[21, 0]]),
        ),
        // The directory entry is changed to other tables, another size, and no table.
        (
            "directory",
            seed(&[
                &[1, 0, 0, 0x13, 0, 2],
                FLUSH_IDLE,
                &[2, 0, 0, 0x07, 0, 1],
                FLUSH_BUSY,
                &[3, 0, 1, 0x93, 6, 7],
                PREPARE,
                &[0, 0, 4, 0x13, 0, 1],
                &[0, 0],
                FLUSH_IDLE,
            ]),
        ),
        // Entries for pages beyond the guest's VRAM, RAM that is not granted or only readable, another card, and an
        // invalid kind.
        (
            "denied",
            seed(&[
                &[9, 1, 9, 6, 0xfc],
                &[9, 0, 5, 9, 7],
                &[9, 1, 10, 12, 0],
                &[10, 1, 11, 14, 8],
                &[10, 1, 12, 15],
                &[10, 1, 13, 1, 0xff],
                &[10, 1, 14, 0x66, 0x40],
                FLUSH_BUSY,
                PREPARE,
            ]),
        ),
        // The GPU maps the table and the directory that map them, and writes both, also through stale TLB entries.
        (
            "gpu_writes",
            seed(&[
                &[4, 0, 1, 0, 0],
                &[4, 0, 1, 1, 3],
                &[4, 0, 0, 2, 2],
                &[12, 0, 0, 3, 6, 0x50],
                &[13, 0, 1, 0, 0x13, 0, 1],
                &[14, 0, 4, 3, 6, 0xff],
                &[15, 0, 8, 1, 6, 0x51],
                FLUSH_BUSY,
                &[19, 0, 1, 33, 2, 6, 0x52],
                &[5, 0, 0, 4, 0, 1, 7, 0x53],
                PREPARE,
            ]),
        ),
        // RAM is withdrawn in the middle of large pages and granted again, at the same place and at another, for
        // reading and for writing.
        (
            "ram",
            seed(&[
                &[7, 1, 9, 11, 0x2f],
                FLUSH_BUSY,
                &[23, 0x2f, 0],
                &[6, 0, 0, 0x0f],
                &[24, 0x1f, 0, 0, 1],
                FLUSH_IDLE,
                &[24, 0x40, 31, 2, 3],
                &[23, 0x10, 49],
                &[24, 0, 31, 0, 2],
                PREPARE,
            ]),
        ),
        // Tables and a directory are in RAM, and the RAM is withdrawn.
        (
            "tables_in_ram",
            encode(&[
                &[&[28, 3], &[0, 3, 0, 0x93, 6, 7], &[7, 6, 0, 9, 2], &[7, 7, 1, 6, 0x40], &[20, 1]],
                &[&[25, 0], &[16, 1], &[25, 0], &[7, 6, 0, 9, 2], &[20, 1], &[23, 0x10, 0], &[29, 1]],
            ]),
        ),
        // Chunks of VRAM move, are withdrawn, and are granted again. The same happens to ranges that the guest keeps.
        (
            "chunks",
            seed(&[
                &[26, 3],
                &[26, 1],
                FLUSH_IDLE,
                &[27, 3],
                &[27, 2, 1],
                PREPARE,
                &[27, 2, 1],
                &[27, 3, 0],
                FLUSH_BUSY,
                &[31, 0x40, 3, 1],
                &[31, 0x20, 63, 0],
            ]),
        ),
        // Two directories share tables, one directory is also a table, and both directories are closed.
        (
            "spaces",
            seed(&[
                &[28, 1],
                &[28, 2],
                &[0, 1, 0, 0x13, 0, 1],
                &[0, 2, 0, 0x12, 0, 1],
                &[20, 1],
                &[20, 2],
                &[4, 1, 1, 0, 0],
                &[13, 1, 0, 1, 6, 0x60],
                &[20, 1],
                FLUSH_BUSY,
                &[29, 1],
                &[28, 4],
                &[29, 0],
            ]),
        ),
        // The mediator's own pages are in a directory entry that the guest also writes.
        (
            "host_pages",
            seed(&[
                &[30, 0, 0, 1, 5],
                &[0, 0, 4, 0x13, 0, 1],
                &[7, 1, 0, 6, 0x42],
                FLUSH_BUSY,
                &[30, 0, 1, 2, 1],
                &[30, 0, 0, 1, 0],
                &[0, 0, 4],
                PREPARE,
                &[30, 0, 2, 3, 7],
            ]),
        ),
        // Whole pages of entries are written at once, in consecutive tables.
        (
            "fills",
            seed(&[
                &[11, 0x30, 1, 6, 0],
                FLUSH_BUSY,
                &[11, 0x30, 0, 0, 0],
                FLUSH_IDLE,
                &[11, 0x20, 0, 9, 0],
                &[1, 0, 2, 0x12, 0, 2],
                &[22, 0],
                &[11, 0x10, 2, 2, 1],
                FLUSH_BUSY,
            ]),
        ),
    ])
}
