//! The card's VBIOS: an image with the tables that drivers parse. Its only code is a return instruction.
//!
//! Contents: the ROM header, the PCI data structure (PCIR), the BIOS information table (BIT) with entries for the
//! version, initialization scripts (none) and the PLL limits, and a display configuration block (DCB) of version 4.0
//! without outputs. The sum of all bytes is 0 modulo 256.
//!
//! Not included: other x86 code, initialization scripts, memory timings (drivers report an unknown memory type and keep
//! the memory settings), power states, voltages, and GPIO and I2C tables.
//!
//! Sources: envytools `hwdocs/bios`, the PCI firmware specification (PCIR), and nouveau's `bios` unit.

use nvspec::chip::{Chip, VENDOR_NVIDIA};
use nvspec::regs::pclock;

/// Size of the image in bytes. Drivers read the image register by register, so it is as small as possible.
pub const IMAGE_BYTES: usize = 1024;
const ROM_UNIT: usize = 512;

const ROM_SIGNATURE: [u8; 2] = [0x55, 0xaa];
/// Offset of the image's entry point. Firmware far-calls the entry point of any kind of image.
const ENTRY: usize = 3;
const FAR_RETURN: u8 = 0xcb;
const PCIR_POINTER: usize = 0x18;
const DCB_POINTER: usize = 0x36;
const PCIR: usize = 0x40;
const BIT: usize = 0x80;
const VERSION: usize = 0xc0;
const SCRIPTS: usize = 0xd8;
const PLL_POINTERS: usize = 0xf0;
const DCB: usize = 0x100;
const PLL_TABLE: usize = 0x140;
const PLL_LIMITS: usize = 0x1c0;

const BIT_SIGNATURE: [u8; 6] = *b"\xff\xb8BIT\0";
const BIT_ENTRY_BYTES: u8 = 6;
const BIT_ENTRIES: usize = BIT + 12;
const DCB_VERSION: u8 = 0x40;
const DCB_HEADER_BYTES: u8 = 0x1b;
const DCB_SIGNATURE: u32 = 0x4edc_bdcb;
/// Version of the image: micro, minor, chip, major, and patch. Major version 0x70 means Fermi.
const IMAGE_VERSION: [u8; 5] = [0x01, 0x00, 0x00, 0x70, 0x00];

const PLL_TABLE_VERSION: u8 = 0x40;
const PLL_TABLE_HEADER_BYTES: u8 = 4;
const PLL_ENTRY_BYTES: u8 = 11;
/// Type number and control register of each PLL.
const PLLS: [(u8, u32); 6] = [
    (0x01, pclock::PLL_MEM::at(0)),
    (0x02, pclock::PLL_MEM::at(8)),
    (0x04, pclock::PLL_A::at(0)),
    (0x05, pclock::PLL_MEM::at(16)),
    (0x07, pclock::PLL_MEM::at(56)),
    (0x0c, pclock::PLL_A::at(8)),
];
/// Oscillator and input frequency ranges in MHz.
const PLL_RANGES_MHZ: [u16; 4] = [900, 2000, 12, 50];
/// Minimum and maximum values of the PLL factors M, N and P.
const PLL_FACTORS: [u8; 6] = [1, 255, 8, 255, 1, 63];

/// Builds the image for a card with this chip.
#[must_use]
pub fn build(chip: &Chip) -> [u8; IMAGE_BYTES] {
    let mut image = Image([0; IMAGE_BYTES]);
    image.put(0, &ROM_SIGNATURE);
    image.put(2, &[(IMAGE_BYTES / ROM_UNIT) as u8]);
    image.put(ENTRY, &[FAR_RETURN]);
    image.put16(PCIR_POINTER, PCIR as u16);
    image.put16(DCB_POINTER, DCB as u16);

    image.put(PCIR, b"PCIR");
    image.put16(PCIR + 0x04, VENDOR_NVIDIA);
    image.put16(PCIR + 0x06, chip.pci_device);
    image.put16(PCIR + 0x0a, 0x18);
    // Class code: 3D controller.
    image.put(PCIR + 0x0d, &[0x00, 0x02, 0x03]);
    image.put16(PCIR + 0x10, (IMAGE_BYTES / ROM_UNIT) as u16);
    // Code type 0, last image.
    image.put(PCIR + 0x14, &[0x00, 0x80]);

    image.put(BIT, &BIT_SIGNATURE);
    let entries = [(b'i', 2, 0x10, VERSION), (b'I', 1, 0x10, SCRIPTS), (b'C', 1, 0x0a, PLL_POINTERS)];
    image.put(BIT + 9, &[BIT_ENTRY_BYTES, entries.len() as u8]);
    for (index, (id, version, length, offset)) in entries.into_iter().enumerate() {
        let at = BIT_ENTRIES + index * usize::from(BIT_ENTRY_BYTES);
        image.put(at, &[id, version]);
        image.put16(at + 2, length);
        image.put16(at + 4, offset as u16);
    }
    image.put(VERSION, &IMAGE_VERSION);
    image.put16(PLL_POINTERS + 8, PLL_TABLE as u16);

    image.put(DCB, &[DCB_VERSION, DCB_HEADER_BYTES, 0, 8]);
    image.put(DCB + 6, &DCB_SIGNATURE.to_le_bytes());

    image.put(PLL_TABLE, &[PLL_TABLE_VERSION, PLL_TABLE_HEADER_BYTES, PLL_ENTRY_BYTES, PLLS.len() as u8]);
    for (index, (kind, register)) in PLLS.into_iter().enumerate() {
        let at = PLL_TABLE + usize::from(PLL_TABLE_HEADER_BYTES) + index * usize::from(PLL_ENTRY_BYTES);
        image.put(at, &[kind]);
        image.put16(at + 1, PLL_LIMITS as u16);
        image.put(at + 3, &register.to_le_bytes());
        image.put16(at + 9, (chip.crystal_hz / 1_000_000) as u16);
    }
    for (index, mhz) in PLL_RANGES_MHZ.into_iter().enumerate() {
        image.put16(PLL_LIMITS + 2 * index, mhz);
    }
    image.put(PLL_LIMITS + 8, &PLL_FACTORS);

    let sum = image.0.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
    image.put(IMAGE_BYTES - 1, &[sum.wrapping_neg()]);
    image.0
}

struct Image([u8; IMAGE_BYTES]);

impl Image {
    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn put16(&mut self, at: usize, value: u16) {
        self.put(at, &value.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    //! Tests with an independent reader, which knows only the signatures and follows the pointers from them.

    use super::build;
    use nvspec::chip::GF100;

    fn u16_at(image: &[u8], at: usize) -> usize {
        usize::from(u16::from_le_bytes([image[at], image[at + 1]]))
    }

    fn u32_at(image: &[u8], at: usize) -> u32 {
        u32::from_le_bytes([image[at], image[at + 1], image[at + 2], image[at + 3]])
    }

    fn bit_entry(image: &[u8], id: u8) -> Option<(u8, usize, usize)> {
        let bit = image.windows(6).position(|bytes| bytes == b"\xff\xb8BIT\0")?;
        let (size, count) = (usize::from(image[bit + 9]), usize::from(image[bit + 10]));
        (0..count)
            .map(|index| bit + 12 + index * size)
            .find(|at| image[*at] == id)
            .map(|at| (image[at + 1], u16_at(image, at + 2), u16_at(image, at + 4)))
    }

    #[test]
    fn image_has_header_size_and_checksum() {
        let image = build(&GF100);
        assert_eq!(&image[..2], [0x55, 0xaa]);
        assert_eq!((usize::from(image[2]) * 512, image[3]), (image.len(), 0xcb));
        assert_eq!(image.iter().map(|byte| u32::from(*byte)).sum::<u32>() % 256, 0);
    }

    #[test]
    fn pci_data_structure_names_the_card_and_is_the_last() {
        let image = build(&GF100);
        let pcir = u16_at(&image, 0x18);
        assert_eq!(&image[pcir..pcir + 4], b"PCIR");
        assert_eq!((u16_at(&image, pcir + 4), u16_at(&image, pcir + 6)), (0x10de, 0x06d8));
        assert_eq!(u16_at(&image, pcir + 0x10) * 512, image.len());
        assert_eq!(image[pcir + 0x15], 0x80);
    }

    #[test]
    fn display_configuration_has_no_outputs() {
        let image = build(&GF100);
        let dcb = u16_at(&image, 0x36);
        assert_eq!((image[dcb], u32_at(&image, dcb + 6)), (0x40, 0x4edc_bdcb));
        assert_eq!(image[dcb + 2], 0);
    }

    #[test]
    fn information_table_leads_to_version_and_scripts() {
        let image = build(&GF100);
        let (version, length, offset) = bit_entry(&image, b'i').expect("version entry");
        assert!(version == 2 && length >= 5 && image[offset + 3] == 0x70);
        let (_, length, offset) = bit_entry(&image, b'I').expect("script entry");
        assert!(image[offset..offset + length].iter().all(|byte| *byte == 0), "no script pointers");
    }

    #[test]
    fn pll_limits_exist_for_memory_clocks_with_a_crystal_in_range() {
        let image = build(&GF100);
        let (_, length, offset) = bit_entry(&image, b'C').expect("clock entry");
        assert!(length >= 10);
        let table = u16_at(&image, offset + 8);
        let (header, size, count) =
            (usize::from(image[table + 1]), usize::from(image[table + 2]), usize::from(image[table + 3]));
        assert_eq!(image[table], 0x40);
        for wanted in [0x0c, 0x04] {
            let entry = (0..count)
                .map(|index| table + header + index * size)
                .find(|at| image[*at] == wanted)
                .expect("a PLL of the memory clock");
            let limits = u16_at(&image, entry + 1);
            let crystal = u16_at(&image, entry + 9);
            assert_eq!(crystal, 27);
            assert!((u16_at(&image, limits + 4)..=u16_at(&image, limits + 6)).contains(&crystal));
        }
    }
}
