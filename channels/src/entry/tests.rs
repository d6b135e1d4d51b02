use super::*;
use proptest::prelude::*;

#[test]
fn address_length_level_and_sync_are_taken_over() {
    for flags in [0, 1 << 41, 1 << 63, 1 << 63 | 1 << 41] {
        let raw = flags | 0x12_3456_7890 | 5 << 42;
        assert_eq!(Entry::check(raw), Some(Entry { raw, end: Some(0x12_3456_78a4) }));
    }
}

#[test]
fn privilege_condition_and_hold_are_cleared() {
    let raw = 0x12_3456_7890 | 5 << 42;
    assert_eq!(Entry::check(raw | 1 | 2 | 1 << 40).map(|entry| entry.raw), Some(raw));
}

#[test]
fn ranges_end_below_the_hosts_addresses() {
    let at = |address: u64, dwords: u64| Entry::check(address | dwords << 42).is_some();
    assert!(at(0xff_f7ff_fffc, 1));
    assert!(!at(0xff_f7ff_fffc, 2));
    assert!(!at(0xff_f800_0000, 1));
    assert!(!at(0xff_ffff_fffc, 0x1f_ffff), "the range ends beyond all addresses");
    assert!(at(0xff_f700_0000, 0x1f_ffff));
}

#[test]
fn of_control_entries_only_a_nop_is_honoured() {
    assert_eq!(Entry::check(0), Some(Entry { raw: 0, end: None }));
    assert_eq!(Entry::check(0x8000_0200_dead_beef), Some(Entry { raw: 0, end: None }), "the operand is ignored");
    for opcode in 1..=0xff {
        assert_eq!(Entry::check(opcode << 32), None);
    }
}

proptest! {
    #[test]
    fn accepted_entries_are_sanitized_and_in_range(raw: u64) {
        if let Some(entry) = Entry::check(raw) {
            prop_assert_eq!(entry.raw & (1 << 40 | 3), 0);
            prop_assert_eq!(entry.raw & !raw, 0);
            let end = (entry.raw & 0xff_ffff_fffc) + 4 * (entry.raw >> 42 & 0x1f_ffff);
            prop_assert!(end <= 0xff_f800_0000);
            prop_assert_eq!(entry.end.unwrap_or(0), end);
        }
    }
}
