use super::*;
use crate::tests::fake::Guest;
use proptest::prelude::*;

const USERD: VramAddr = VramAddr(0x1_2345_6000);
const CHANNEL: nvspec::fifo::ChannelId = nvspec::fifo::ChannelId(1);
const RING: GpuVa = GpuVa(0xff_f802_0000);
/// Virtual addresses of the images for PGRAPH, CE0 and CE1.
const IMAGES: [u64; 3] = [0xff_f802_6000, 0xff_f802_4000, 0xff_f802_5000];
const DIRECTORY: VramAddr = VramAddr(0x2_0001_0000);

fn parse_with(offset: u64, value: u32) -> Result<GuestInstance, InstanceError> {
    let mut guest = Guest::default();
    guest.instance(0, 0x5000);
    guest.put(offset, value);
    let mut block = [0; BLOCK];
    crate::GuestMemory::read(&mut guest, Place::Vram(GuestVramAddr(0)), &mut block).unwrap();
    GuestInstance::parse(&block)
}

#[test]
fn instance_block_of_driver_is_parsed() {
    let guest = parse_with(context::GR, 0x40_0000 | context::VALID).unwrap();
    assert_eq!(
        guest,
        GuestInstance {
            userd: GuestVramAddr(0x5000),
            gp_base: GpuVa(0x12_2000_0000),
            gp_entries_log2: 10,
            gp_get: 0,
            gp_put: 0,
            directory: Place::Vram(GuestVramAddr(0x7000)),
            contexts: [Some(GpuVa(0x40_0000)), None, None],
        }
    );
    assert_eq!(guest.gp_entries(), 1024);
}

#[test]
fn unsupported_instance_block_is_rejected() {
    assert_eq!(GuestInstance::parse(&[0; 100]), Err(InstanceError::Short));
    for target in 1..4 {
        assert_eq!(parse_with(ramfc::USERD_LO, 0x5000 | target), Err(InstanceError::Userd));
    }
    assert_eq!(parse_with(ramfc::GP_BASE_HI, 21 << 16), Err(InstanceError::RingSize(21)));
    assert_eq!(parse_with(ramfc::GP_BASE_HI, u32::MAX), Err(InstanceError::RingSize(0xffff)));
    assert_eq!(parse_with(vm::PDB_LO, 0x7001), Err(InstanceError::Directory));
}

#[test]
fn a_directory_in_ram_is_one() {
    let guest = parse_with(vm::PDB_LO, 0x7000 | 3 | 1 << 2).unwrap();
    assert_eq!(guest.directory, Place::Ram(nvspec::addr::Gpa(0x7000)));
}

#[test]
fn block_refers_to_host_userd_ring_and_directory() {
    let block = parse_with(context::CE1, 0x7_7000 | context::VALID).unwrap().block(CHANNEL.into(), USERD, DIRECTORY);
    let at = |offset| word(&block, offset).unwrap();
    assert_eq!((at(ramfc::USERD_LO), at(ramfc::USERD_HI)), (0x2345_6000, 1));
    assert_eq!((at(vm::PDB_LO), at(vm::PDB_HI)), (0x0001_0000, 2));
    assert_eq!((at(ramfc::GP_BASE_LO), at(ramfc::GP_BASE_HI)), (0xf802_0000, 9 << 16 | 0xff));
    assert_eq!((at(vm::LIMIT_LO), at(vm::LIMIT_HI)), (0xffff_ffff, 0xff));
    assert_eq!((at(context::GR), at(context::CE1)), (0, 0xf802_5000 | context::VALID));
    assert_eq!(at(ramfc::SIGNATURE), ramfc::SIGNATURE_VALUE);
}

proptest! {
    /// Checks for arbitrary guest instance blocks that only permitted fields reach the card, within their ranges.
    #[test]
    fn nothing_but_the_whitelist_reaches_the_card(mut bytes in prop::collection::vec(any::<u8>(), BLOCK), sane in any::<bool>()) {
        if sane {
            // Without these changes, almost every block would be rejected.
            bytes[0x08] &= !3;
            bytes[0x4e] %= 21;
            bytes[0x4f] = 0;
            bytes[0x200] &= !3;
        }
        let Ok(guest) = GuestInstance::parse(&bytes) else {
            prop_assert!(!sane);
            return Ok(());
        };
        let block = guest.block(CHANNEL.into(), USERD, DIRECTORY);
        let mut expected = [0u8; BLOCK];
        let mut put = |at: usize, value: u64, len: usize| {
            expected[at..at + len].copy_from_slice(&value.to_le_bytes()[..len]);
        };
        for (offset, value) in ramfc::DEFAULTS {
            put(offset as usize, value.into(), 4);
        }
        let wide = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        put(0x08, USERD.0, 8);
        put(0x48, RING.0 | 9 << 48, 8);
        put(0x200, DIRECTORY.0, 8);
        put(0x208, 0xff_ffff_ffff, 8);
        // The guest determines whether a context exists, and the host determines the location of its image.
        for (at, image) in [0x210, 0x230, 0x240].into_iter().zip(IMAGES) {
            if wide(at) & 4 != 0 {
                put(at, image | 4, 8);
            }
        }
        prop_assert_eq!(&block[..], &expected[..]);
    }
}
