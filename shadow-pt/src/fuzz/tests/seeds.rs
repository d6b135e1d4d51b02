//! Seed inputs of the fuzz target, by name: handwritten life cycles of address spaces. The first number of each
//! operation is its kind. The operands follow in the format of `Machine::step`.

use crate::model::machine::OP_BYTES;
use std::collections::BTreeMap;

/// A sequence of operations. Omitted operands are 0.
type Ops<'a> = &'a [&'a [u8]];

/// Mode byte of all seeds, which selects the default mode and a high table limit. The tests also run the seeds in all
/// other modes.
const MODE: u8 = 3;

/// Makes the first entry of the first directory refer to a large-page and a small-page table, each an eighth of the
/// full size.
const TABLES: &[u8] = &[0, 0, 0, 0x13, 0, 1];
/// Sets entries 0 to 7 of the small-page table to VRAM pages 0x40 to 0x47, and entry 8 to a granted RAM page.
const SMALL: Ops<'_> = &[&[7, 1, 0, 6, 0x40], &[7, 1, 1, 7, 0x41], &[7, 1, 7, 8, 0x47], &[7, 1, 8, 11, 0x14]];
/// Sets entries of the large-page table to VRAM, to a page that contains a table, and to contiguous RAM.
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

/// Returns the seeds. Each seed first creates tables, entries of both sizes, and their shadow.
pub(super) fn seeds() -> BTreeMap<&'static str, Vec<u8>> {
    let seed = |rest: Ops<'_>| encode(&[&[TABLES], SMALL, LARGE, &[PREPARE], rest]);
    BTreeMap::from([
        // Unmap a small and a large page, and make a page read-only, with each kind of flush.
        (
            "unmap",
            seed(&[&[7, 1, 0], FLUSH_IDLE, &[8, 0, 1], FLUSH_BUSY, &[7, 1, 1, 0x36, 0x41], &[18, 0, 32], &[21, 0]]),
        ),
        // Change the directory entry to other tables, to another size, and to no tables.
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
        // Refer to pages beyond the guest's VRAM, to RAM that is read-only or not granted, and to peer memory, and use
        // an invalid storage kind.
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
        // The GPU maps the pages of the table and of the directory, and writes to both, also through stale TLB entries.
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
        // Withdraw RAM in the middle of large pages, and grant it again at the same or another address, for reading or
        // writing.
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
        // Place tables and a directory in RAM, and withdraw this RAM.
        (
            "tables_in_ram",
            encode(&[
                &[&[28, 3], &[0, 3, 0, 0x93, 6, 7], &[7, 6, 0, 9, 2], &[7, 7, 1, 6, 0x40], &[20, 1]],
                &[&[25, 0], &[16, 1], &[25, 0], &[7, 6, 0, 9, 2], &[20, 1], &[23, 0x10, 0], &[29, 1]],
            ]),
        ),
        // Move, withdraw and grant chunks of VRAM. Then do the same with ranges that the guest still owns.
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
        // Share tables between two directories, use one directory also as a table, and close both.
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
        // Map mediator pages through a directory entry that the guest also writes.
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
        // Write whole pages of entries, in consecutive tables.
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
