use proptest::prelude::*;

use super::*;

const HOPPER: (u32, u32) = (9, 0);

fn names(code: &Code) -> Vec<&str> {
    code.variables.iter().map(|name| std::str::from_utf8(name).expect("text")).collect()
}

/// An entry: kind, architecture, flags, compressed data, decompressed size.
type Packed<'a> = (u16, u32, u64, &'a [u8], usize);

fn container(entries: &[Packed<'_>]) -> Vec<u8> {
    let mut body = Vec::new();
    for (kind, architecture, flags, data, unpacked) in entries {
        let padded = data.len().next_multiple_of(8);
        let mut header = vec![0u8; 64];
        header[0..2].copy_from_slice(&kind.to_le_bytes());
        header[4..8].copy_from_slice(&64u32.to_le_bytes());
        header[8..16].copy_from_slice(&(padded as u64).to_le_bytes());
        header[16..20].copy_from_slice(&(data.len() as u32).to_le_bytes());
        header[28..32].copy_from_slice(&architecture.to_le_bytes());
        header[40..48].copy_from_slice(&flags.to_le_bytes());
        header[56..64].copy_from_slice(&(*unpacked as u64).to_le_bytes());
        body.extend(header);
        body.extend(*data);
        body.resize(body.len() + padded - data.len(), 0);
    }
    let mut bytes = 0xba55_ed50_u32.to_le_bytes().to_vec();
    bytes.extend([1, 0, 16, 0]);
    bytes.extend((body.len() as u64).to_le_bytes());
    bytes.extend(body);
    bytes
}

/// A symbol: name, type, section.
type Symbol<'a> = (&'a str, u8, u16);

/// A section: name, type, value of `sh_info`, size in bytes.
type Extra<'a> = (&'a str, u32, u32, u64);

/// Builds an ELF file. Its sections are the null section, section names, symbol names, symbols, and `extra` from index
/// 4.
fn elf(symbols: &[Symbol<'_>], extra: &[Extra<'_>]) -> Vec<u8> {
    let mut text = vec![0u8];
    let mut table = vec![0u8; 24];
    for (name, kind, section) in symbols {
        let at = if name.is_empty() { 0 } else { text.len() as u32 };
        table.extend(at.to_le_bytes());
        table.extend([*kind, 0]);
        table.extend(section.to_le_bytes());
        table.extend([0; 16]);
        if !name.is_empty() {
            text.extend(name.as_bytes());
            text.push(0);
        }
    }
    let mut names = vec![0u8];
    let mut headers = vec![0u8; 64];
    let mut file = vec![0u8; 64];
    let own = [(".shstrtab", 3, 0, 0), (".strtab", 3, 0, 0), (".symtab", 2, 0, 0)];
    for (number, (name, kind, info, size)) in own.iter().chain(extra).enumerate() {
        let (at, bytes, link) = match number {
            0 => (0, 0, 0),
            1 => (file.len(), text.len() as u64, 0),
            2 => (file.len(), table.len() as u64, 2),
            _ => (file.len(), *size, 0),
        };
        match number {
            1 => file.extend(&text),
            2 => file.extend(&table),
            _ if *kind != 8 => file.resize(file.len() + *size as usize, 0),
            _ => {}
        }
        let mut header = vec![0u8; 64];
        header[0..4].copy_from_slice(&(names.len() as u32).to_le_bytes());
        header[4..8].copy_from_slice(&u32::to_le_bytes(*kind));
        header[24..32].copy_from_slice(&(at as u64).to_le_bytes());
        header[32..40].copy_from_slice(&bytes.to_le_bytes());
        header[40..44].copy_from_slice(&u32::to_le_bytes(link));
        header[44..48].copy_from_slice(&u32::to_le_bytes(*info));
        headers.extend(header);
        names.extend(name.as_bytes());
        names.push(0);
    }
    headers[64 + 24..64 + 32].copy_from_slice(&(file.len() as u64).to_le_bytes());
    headers[64 + 32..64 + 40].copy_from_slice(&(names.len() as u64).to_le_bytes());
    file.extend(&names);
    file[..6].copy_from_slice(b"\x7fELF\x02\x01");
    let at = file.len() as u64;
    file[40..48].copy_from_slice(&at.to_le_bytes());
    file[58..60].copy_from_slice(&64u16.to_le_bytes());
    file[60..62].copy_from_slice(&((headers.len() / 64) as u16).to_le_bytes());
    file[62..64].copy_from_slice(&1u16.to_le_bytes());
    file.extend(headers);
    file
}

/// Returns a cubin with a variable, a constant, and a kernel with parameters.
fn cubin() -> Vec<u8> {
    let symbols = [("_ZL5count", 1, 4), ("table", 0x11, 5), ("kernel", 0x12, 7), ("parameters", 1, 6)];
    let extra = [(".nv.global", 8, 0, 64), (".nv.constant3", 1, 0, 32), (".nv.constant0.kernel", 1, 0, 8)];
    elf(&symbols, &[&extra[..], &[(".text.kernel", 1, 0, 16)]].concat())
}

#[test]
fn declarations_of_ptx_are_found() {
    let text = b".version 8.0\n.target sm_90\n.address_size 64\n\n.global .align 4 .b8 first[64];\n\
        .visible .const .align 8 .u64 second = 7, third[2] = {1, 0x2};\n// .global .u32 comment;\n\
        .weak\t.global .attribute(.managed) .align 4 .f32 fourth[2][3];/* .global .u32 other; */\
        .extern .global .u32 fifth;\n.global .texref reference;\n.pragma \".global .u32 text;\";\n\
        .visible .entry f(.param .u64 .ptr .global .align 8 f_param_0) { ld.global.u32 %r1, [%rd1];\n\
        .global .v4 .f32 sixth; st.global.u32 [sixth], %r1; }\0.global .u32 after;";
    let code = examine(text, HOPPER).expect("readable");
    assert_eq!(names(&code), ["fifth", "first", "fourth", "second", "sixth", "third"]);
    assert!(!code.has_addresses && !code.allocates);
    assert_eq!(examine(b"", HOPPER), Ok(Code::default()));
}

#[test]
fn addresses_and_allocations_of_ptx_are_found() {
    let code = examine(b".global .u64 table[2] = {f, generic(g)};", HOPPER).expect("readable");
    assert!(code.has_addresses && names(&code) == ["table"]);
    let code = examine(b".extern .func (.param .b64 p) malloc (.param .b64 q);", HOPPER).expect("readable");
    assert!(code.allocates && code.variables.is_empty());
    assert!(!examine(b".func malloc_of_mine() { }", HOPPER).expect("readable").allocates);
}

#[test]
fn declarations_that_are_not_understood_are_malformed() {
    for text in [".global", ".global .u32 x", ".global .u32;", ".global .u32 x[4;", ".global .u32 x];", ".const = 3;"] {
        assert_eq!(examine(text.as_bytes(), HOPPER), Err(Unreadable::Malformed), "{text}");
    }
    let long = format!(".global .u32 {};", "x".repeat(MAX_NAME_BYTES + 1));
    assert_eq!(examine(long.as_bytes(), HOPPER), Err(Unreadable::Limit));
    let many: String = (0..=MAX_VARIABLES).map(|n| format!(".global .u32 x{n};")).collect();
    assert_eq!(examine(many.as_bytes(), HOPPER), Err(Unreadable::Limit));
}

#[test]
fn symbols_of_variables_are_found_in_a_cubin() {
    let code = examine(&cubin(), HOPPER).expect("readable");
    assert_eq!(names(&code), ["_ZL5count", "table"]);
    assert!(!code.has_addresses && !code.allocates);
    let allocating = elf(&[("malloc", 0x12, 0)], &[]);
    assert!(examine(&allocating, HOPPER).expect("readable").allocates);
    for kind in [4, 9] {
        let pointers = elf(&[("table", 1, 4)], &[(".nv.global.init", 1, 0, 8), (".rel.nv.global.init", kind, 4, 16)]);
        assert!(examine(&pointers, HOPPER).expect("readable").has_addresses, "{kind}");
    }
    let common = elf(&[("shared", 1, 0xfff2)], &[]);
    assert_eq!(names(&examine(&common, HOPPER).expect("readable")), ["shared"]);
}

#[test]
fn variables_without_names_are_reported() {
    for symbols in [&[][..], &[("kernel", 2, 4)], &[("", 1, 4)]] {
        let file = elf(symbols, &[(".nv.global", 8, 0, 64)]);
        assert_eq!(examine(&file, HOPPER), Err(Unreadable::Names), "{symbols:?}");
    }
    assert_eq!(examine(&elf(&[], &[(".nv.global", 8, 0, 0)]), HOPPER), Ok(Code::default()));
}

#[test]
fn parts_of_a_cubin_are_malformed() {
    let whole = cubin();
    for length in 4..whole.len() {
        assert_eq!(examine(&whole[..length], HOPPER), Err(Unreadable::Malformed), "{length} bytes");
    }
}

#[test]
fn code_for_the_card_is_chosen_from_a_container() {
    let other = elf(&[("other", 1, 4)], &[(".nv.global", 8, 0, 64)]);
    let own = cubin();
    let ptx = b".global .u32 portable;";
    let all: [Packed<'_>; 3] = [(2, 80, 0, &other, 0), (2, 90, 0, &own, 0), (1, 70, 0, ptx, 0)];
    let read = |entries: &[Packed<'_>], capability| examine(&container(entries), capability);
    assert_eq!(names(&read(&all, HOPPER).expect("readable")), ["_ZL5count", "table"]);
    assert_eq!(names(&read(&all, (8, 9)).expect("readable")), ["other"]);
    assert_eq!(names(&read(&all, (12, 0)).expect("readable")), ["portable"]);
    assert_eq!(read(&all[..2], (12, 0)), Err(Unreadable::Kind));
    assert_eq!(read(&[(64, 90, 0, b"BC", 0)], HOPPER), Err(Unreadable::Kind));
    assert_eq!(read(&[], HOPPER), Ok(Code::default()));
}

#[test]
fn compressed_entries_are_unpacked() {
    // Four literals, a match of four bytes at offset 4, and the remaining literals.
    let text = b"abc;abc;.global .u32 packed;";
    let packed = [&b"\x40abc;\x04\x00\xf0\x05"[..], &text[8..]].concat();
    let lz4: Packed<'_> = (1, 90, 0x2000, &packed, text.len());
    assert_eq!(names(&examine(&container(&[lz4]), HOPPER).expect("readable")), ["packed"]);
    let zstd = zstd(text);
    for flags in [0x8000, 0xa011, 0x2000] {
        let entry: Packed<'_> = (1, 90, flags, &zstd, text.len());
        assert_eq!(names(&examine(&container(&[entry]), HOPPER).expect("readable")), ["packed"], "{flags:#x}");
    }
    for (flags, packed, size) in [
        (0x2000, &packed[..], text.len() + 1),
        (0x2000, &packed[1..], text.len()),
        (0x8000, &zstd, text.len() - 1),
        (0x8000, &zstd, text.len() + 1),
        (0x8000, &packed, text.len()),
        (0x8000, &zstd[..zstd.len() - 1], text.len()),
    ] {
        let found = examine(&container(&[(1, 90, flags, packed, size)]), HOPPER);
        assert_eq!(found, Err(Unreadable::Malformed), "{flags:#x}, {size} bytes");
    }
    let huge = examine(&container(&[(1, 90, 0x8000, &zstd, MAX_UNPACKED_BYTES + 1)]), HOPPER);
    assert_eq!(huge, Err(Unreadable::Limit));
}

/// Returns Zstandard data with one uncompressed block.
fn zstd(data: &[u8]) -> Vec<u8> {
    let mut bytes = 0xfd2f_b528_u32.to_le_bytes().to_vec();
    // A single segment with a 1-byte content size, followed by the header of the last block.
    bytes.extend([0x20, data.len() as u8]);
    bytes.extend_from_slice(&((data.len() as u32) << 3 | 1).to_le_bytes()[..3]);
    bytes.extend(data);
    bytes
}

#[test]
fn malformed_containers_are_refused() {
    let whole = container(&[(2, 90, 0, &cubin(), 0)]);
    for length in 4..whole.len() {
        assert_eq!(examine(&whole[..length], HOPPER), Err(Unreadable::Malformed), "{length} bytes");
    }
    let mut endless = whole.clone();
    endless[20..32].fill(0);
    assert_eq!(examine(&endless, HOPPER), Err(Unreadable::Malformed), "an entry without a header");
    let mut huge = whole;
    huge[24..32].fill(0xff);
    assert_eq!(examine(&huge, HOPPER), Err(Unreadable::Malformed));
    let many = container(&vec![(1, 90, 0, &b""[..], 0); 4097]);
    assert_eq!(examine(&many, HOPPER), Err(Unreadable::Limit));
}

proptest! {
    #[test]
    fn changed_images_cause_no_fault(
        at in any::<prop::sample::Index>(), value in any::<u8>(), length in any::<prop::sample::Index>()
    ) {
        let mut image = container(&[(2, 90, 0, &cubin(), 0), (1, 90, 0x2000, b"\x40abcd\x04\x00\x10e", 9)]);
        image.truncate(length.index(image.len() + 1));
        if !image.is_empty() {
            let at = at.index(image.len());
            image[at] = value;
        }
        let _ = examine(&image, HOPPER);
    }
}
