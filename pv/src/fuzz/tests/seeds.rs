//! Seed inputs of the fuzz target, by name: handwritten life cycles of tables. The first number of each step is its
//! kind. The operands follow in the format of `Machine::step`.

use crate::model::machine::STEP_BYTES;
use std::collections::BTreeMap;

/// A sequence of steps. Omitted operands are 0.
type Steps<'a> = &'a [&'a [u8]];

const SEND: &[u8] = &[23];
/// Creates directory 1, small-page tables 2 and 3, and large-page tables 4 and 5. The first operand of each step is the
/// handle minus one.
const TABLES: Steps<'_> = &[&[0, 0, 0], &[1, 1, 1], &[2, 2, 1], &[0, 3, 2], &[0, 4, 2], SEND];
/// Makes the first entries of the directory refer to a small-page table, to a large-page table, and to both.
const NAMED: Steps<'_> = &[&[4, 0, 0, 1, 0x80], &[5, 0, 1, 0x80, 3], &[6, 0, 2, 2, 4], &[21]];

fn encode(parts: &[Steps<'_>]) -> Vec<u8> {
    let mut out = vec![0];
    for step in parts.concat() {
        let mut bytes = [0; STEP_BYTES];
        bytes[..step.len()].copy_from_slice(step);
        out.extend(bytes);
    }
    out
}

/// Returns the seeds. Each seed starts with a directory that refers to tables.
pub(super) fn seeds() -> BTreeMap<&'static str, Vec<u8>> {
    let seed = |rest: Steps<'_>| encode(&[TABLES, NAMED, rest]);
    BTreeMap::from([
        // Write entries in all possible ways, at page and table boundaries, and beyond the end.
        (
            "entries",
            seed(&[
                &[7, 1, 0, 8, 1, 0x40, 3, 4],
                &[8, 3, 3, 5, 3, 40, 2, 0],
                &[9, 2, 3, 2, 1, 7],
                &[10, 3, 6, 0, 4, 9],
                &[22],
                &[11, 1, 0, 4],
                &[11, 3, 4, 4],
                &[20, 1, 0, 0, 0xff, 0xff],
                &[20, 0, 4, 0, 8, 0],
                SEND,
                &[7, 1, 8, 1, 1, 1],
                SEND,
                &[8, 1, 9, 0, 1, 1],
                SEND,
            ]),
        ),
        // Free tables to which entries refer, and reuse their slots.
        (
            "names",
            seed(&[
                &[7, 1, 0, 4, 1, 1, 3, 4],
                &[3, 1],
                &[3, 4],
                SEND,
                &[4, 0, 0, 0x80, 0x80],
                &[5, 0, 2, 2, 0x80],
                SEND,
                &[0, 1, 1],
                &[6, 0, 2, 1, 0x80],
                &[3, 0],
                SEND,
                &[0, 0, 0],
                &[3, 2],
                SEND,
            ]),
        ),
        // Bind address spaces to directories, free and reuse the directories' handles, flush, and unbind.
        (
            "bindings",
            seed(&[
                &[12, 0, 1, 1],
                &[13, 0, 2, 1],
                &[14, 0, 1],
                &[3, 0],
                SEND,
                &[0, 0, 0],
                &[12, 0, 1, 1],
                &[14, 0, 0],
                SEND,
                &[12, 0, 2, 0],
                SEND,
                &[13, 0, 5, 1],
                SEND,
                &[12, 1, 1, 1],
                SEND,
            ]),
        ),
        // Execute valid operations and queries on channels, memory and segments, and an invalid operation.
        (
            "others",
            seed(&[
                &[15, 0],
                &[15, 1, 7],
                &[15, 5, 3, 0, 1, 2, 3],
                &[15, 6, 7, 0, 5, 0, 1],
                &[15, 7, 7, 0, 0, 0, 5],
                &[15, 8, 7, 0, 7, 0, 11],
                &[15, 9, 1, 0, 7, 0, 3, 3],
                &[15, 24, 1, 5],
                &[15, 25, 1, 0],
                &[15, 26, 4, 3],
                &[15, 27],
                SEND,
                &[15, 0x1b],
                SEND,
            ]),
        ),
        // Send malformed batches: with modified bytes, truncation, unknown codes, or excessively long lists.
        (
            "malformed",
            seed(&[
                &[0, 5, 2],
                &[17, 12, 0, 0x40],
                SEND,
                &[0, 5, 2],
                &[18, 0xc0],
                SEND,
                &[3, 1],
                &[16, 9, 0, 1, 1],
                SEND,
                &[9, 1, 0, 1, 1, 1, 0xff, 1],
                SEND,
                SEND,
                &[17, 4, 0, 1],
                &[3, 1],
                SEND,
            ]),
        ),
        // Reset the interface, and reuse its handles.
        ("reset", encode(&[TABLES, NAMED, &[&[12, 0, 1, 1], SEND, &[19]], TABLES, NAMED, &[&[19], &[19]]])),
    ])
}
