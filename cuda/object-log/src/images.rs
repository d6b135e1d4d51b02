//! Images of modules.

/// An image: its words, followed by at least one zero byte, and its size in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Image {
    /// The bytes, in words; the last word is padded with zeros.
    pub words: Vec<u64>,
    /// Number of bytes.
    pub bytes: usize,
}

/// First bytes of an ELF file, and of a container with several images.
const ELF: &[u8] = b"\x7fELF";
const CONTAINER: [u8; 4] = 0xba55_ed50_u32.to_le_bytes();
/// Flags of a container's entry whose image is compressed, with either method.
const COMPRESSED: u64 = 0x2000 | 0x8000;
/// Beginning of the names of ELF sections with variables.
const SECTION: &[u8] = b".nv.global";
/// Section of PTX with a variable.
const DIRECTIVE: &str = ".global";

impl Image {
    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes: Vec<u8> = self.words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.truncate(self.bytes);
        bytes
    }
}

/// Returns true if an image has variables, or may have some. Kernels may change variables, and a new worker would load
/// them with their first values.
pub fn may_have_variables(image: &Image) -> bool {
    let bytes = image.to_bytes();
    if bytes.starts_with(&CONTAINER) {
        return container(&bytes).is_none_or(|entries| entries.iter().any(|entry| entry.is_none_or(of_plain)));
    }
    of_plain(&bytes)
}

/// Returns true if an image that is not a container has variables.
fn of_plain(bytes: &[u8]) -> bool {
    if bytes.starts_with(ELF) {
        return bytes.windows(SECTION.len()).any(|window| window == SECTION);
    }
    // PTX: a declaration begins a statement; instructions such as `ld.global` only contain the word.
    let text = String::from_utf8_lossy(bytes);
    let statements = text.split([';', '{', '}', '\n']).map(str::trim_start);
    let linkage = [".visible", ".extern", ".weak", ".common"];
    let mut declared = statements.map(|statement| {
        linkage.iter().find_map(|word| statement.strip_prefix(word)).unwrap_or(statement).trim_start()
    });
    declared.any(|statement| statement.starts_with(DIRECTIVE))
}

/// Returns the images of a container: `None` for a compressed one, and no list if the container is malformed.
fn container(bytes: &[u8]) -> Option<Vec<Option<&[u8]>>> {
    let number = |at: usize, size: usize| {
        let part = bytes.get(at..at.checked_add(size)?)?;
        Some(part.iter().rev().fold(0u64, |value, byte| value << 8 | u64::from(*byte)))
    };
    let length = |at: usize, size: usize| usize::try_from(number(at, size)?).ok();
    let mut at = length(6, 2)?;
    let end = at.checked_add(length(8, 8)?)?;
    let mut images = Vec::new();
    while at < end {
        let (header, size, flags) = (length(at + 4, 4)?, length(at + 8, 8)?, number(at + 40, 8)?);
        let first = at.checked_add(header)?;
        let image = bytes.get(first..first.checked_add(size)?)?;
        images.push((flags & COMPRESSED == 0).then_some(image));
        // An entry without a header would repeat itself.
        if header == 0 {
            return None;
        }
        at = first + size;
    }
    Some(images)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(bytes: &[u8]) -> Image {
        let word = |part: &[u8]| part.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        Image { words: bytes.chunks(8).map(word).collect(), bytes: bytes.len() }
    }

    fn packed(entries: &[(u64, &[u8])]) -> Vec<u8> {
        let mut body = Vec::new();
        for (flags, data) in entries {
            let mut header = vec![0u8; 64];
            header[0] = 2;
            header[4..8].copy_from_slice(&64u32.to_le_bytes());
            header[8..16].copy_from_slice(&(data.len() as u64).to_le_bytes());
            header[40..48].copy_from_slice(&flags.to_le_bytes());
            body.extend(header);
            body.extend(*data);
        }
        let mut bytes = CONTAINER.to_vec();
        bytes.extend([1, 0, 16, 0]);
        bytes.extend((body.len() as u64).to_le_bytes());
        bytes.extend(body);
        bytes
    }

    #[test]
    fn variables_are_found_in_each_kind_of_image() {
        for text in [
            ".version 8.0\n.global .align 4 .b8 name[64];",
            ".visible .global .u32 n;",
            "}.weak .global .u32 n;",
            "  .extern\t.global .u32 n;",
        ] {
            assert!(may_have_variables(&image(text.as_bytes())), "{text}");
        }
        assert!(may_have_variables(&image(b"\x7fELF....\0.nv.global.init\0")));
        assert!(may_have_variables(&image(&packed(&[(0, b"\x7fELF"), (0, b"\x7fELF .nv.global\0")]))));
    }

    #[test]
    fn images_without_variables_are_accepted() {
        for text in [".version 8.0\n.entry f() { ld.global.u32 %r1, [%rd1]; }", ".const .u32 n;", ""] {
            assert!(!may_have_variables(&image(text.as_bytes())), "{text}");
        }
        assert!(!may_have_variables(&image(b"\x7fELF .text.kernel .nv.constant0")));
        assert!(!may_have_variables(&image(&packed(&[(0x11, b"\x7fELF"), (0, b".version 8.0")]))));
        assert!(!may_have_variables(&Image::default()));
    }

    #[test]
    fn compressed_and_malformed_containers_may_have_variables() {
        for flags in [0x2000, 0x8000, 0xa011] {
            assert!(may_have_variables(&image(&packed(&[(0, b"\x7fELF"), (flags, b"\x7fELF")]))), "{flags:#x}");
        }
        let whole = packed(&[(0, b"\x7fELF")]);
        for length in 4..whole.len() {
            assert!(may_have_variables(&image(&whole[..length])), "{length} bytes");
        }
        let mut endless = whole.clone();
        endless[20..32].fill(0);
        assert!(may_have_variables(&image(&endless)), "an entry without a header");
        let mut huge = whole;
        huge[24..32].fill(0xff);
        assert!(may_have_variables(&image(&huge)));
    }
}
