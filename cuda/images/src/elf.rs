//! Cubins: ELF files with a symbol table.

use std::collections::HashSet;

use crate::{Code, MAX_NAME_BYTES, Unreadable, length, number};

/// Size of a section header in bytes.
const SECTION_BYTES: usize = 64;
/// Size of a symbol in bytes.
const SYMBOL_BYTES: usize = 24;
/// Section type of symbol tables.
const SYMBOLS: u64 = 2;
/// Section types of relocations.
const RELOCATIONS: [u64; 2] = [4, 9];
/// Symbol type of data.
const OBJECT: u64 = 1;
/// Section index of common symbols, which have no section.
const COMMON: usize = 0xfff2;
/// Name prefix of the sections for variables that kernels can change.
const VARIABLES: &[u8] = b".nv.global";
/// Name prefix of the sections for variables that only the host can change. A number follows and, for the parameters of
/// a kernel, the kernel's name.
const CONSTANTS: &[u8] = b".nv.constant";

/// A section of the ELF file.
#[derive(Clone, Copy)]
struct Section<'a> {
    name: &'a [u8],
    kind: u64,
    link: usize,
    info: usize,
    bytes: usize,
    data: &'a [u8],
}

/// Returns true if the bytes are an ELF file.
pub fn is_elf(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\x7fELF")
}

/// Returns the bytes before the next NUL. Reads at most one byte more than the maximum name length, because many
/// symbols of a hostile file can refer to the same long string.
fn text(bytes: &[u8], at: usize) -> Option<&[u8]> {
    let rest = bytes.get(at..)?;
    let read = rest.get(..rest.len().min(MAX_NAME_BYTES + 1))?;
    match read.iter().position(|byte| *byte == 0) {
        Some(end) => read.get(..end),
        None => (read.len() > MAX_NAME_BYTES).then_some(read),
    }
}

fn sections(file: &[u8]) -> Option<Vec<Section<'_>>> {
    // Only 64-bit little-endian files are supported.
    if file.get(4..6)? != [2, 1] {
        return None;
    }
    let (first, size, count) = (length(file, 40, 8)?, length(file, 58, 2)?, length(file, 60, 2)?);
    if count == 0 || size < SECTION_BYTES {
        return None;
    }
    let table = file.get(first..first.checked_add(size.checked_mul(count)?)?)?;
    let headers: Vec<&[u8]> = table.chunks_exact(size).collect();
    let data = |header: &[u8]| {
        let (at, bytes) = (length(header, 24, 8)?, length(header, 32, 8)?);
        // A section without data (`SHT_NOBITS`) has only a size.
        if number(header, 4, 4)? == 8 { Some(&[][..]) } else { file.get(at..at.checked_add(bytes)?) }
    };
    let names = data(headers.get(length(file, 62, 2)?)?)?;
    let section = |header: &&'_ [u8]| {
        let header = *header;
        Some(Section {
            name: text(names, length(header, 0, 4)?)?,
            kind: number(header, 4, 4)?,
            link: length(header, 40, 4)?,
            info: length(header, 44, 4)?,
            bytes: length(header, 32, 8)?,
            data: data(header)?,
        })
    };
    headers.iter().map(section).collect()
}

impl Section<'_> {
    fn has_variables(&self) -> bool {
        self.name.starts_with(VARIABLES)
    }

    fn has_constants(&self) -> bool {
        let bank = self.name.strip_prefix(CONSTANTS);
        bank.is_some_and(|bank| !bank.is_empty() && bank.iter().all(u8::is_ascii_digit))
    }
}

/// Adds the properties of a cubin to `code`.
pub fn read(file: &[u8], code: &mut Code) -> Result<(), Unreadable> {
    let sections = sections(file).ok_or(Unreadable::Malformed)?;
    let mut named = HashSet::new();
    for table in sections.iter().filter(|section| section.kind == SYMBOLS) {
        let names = sections.get(table.link).ok_or(Unreadable::Malformed)?.data;
        for symbol in table.data.chunks_exact(SYMBOL_BYTES) {
            let fields = || Some((length(symbol, 0, 4)?, number(symbol, 4, 1)? & 15, length(symbol, 6, 2)?));
            let (at, kind, section) = fields().ok_or(Unreadable::Malformed)?;
            let name = text(names, at).ok_or(Unreadable::Malformed)?;
            code.allocates |= name == b"malloc";
            let is_data = sections.get(section).is_some_and(|of| of.has_variables() || of.has_constants());
            if kind == OBJECT && (is_data || section == COMMON) {
                code.add(name)?;
                named.insert(section);
            }
        }
    }
    for (number, section) in sections.iter().enumerate() {
        if section.has_variables() && section.bytes > 0 && !named.contains(&number) {
            return Err(Unreadable::Names);
        }
        let target = sections.get(section.info).filter(|_| RELOCATIONS.contains(&section.kind));
        code.has_addresses |= section.bytes > 0
            && target.is_some_and(|of| of.has_variables() || of.has_constants() && named.contains(&section.info));
    }
    Ok(())
}
