//! Integer, logic and move instructions, compared with 128-bit arithmetic.

use super::rig::{Input, Output, check, compute, inputs};

const EDGES: [u64; 12] =
    [0, 1, 2, 31, 32, 0x80, 0x7fff, 0x7fff_ffff, 0x8000_0000, 0x8000_0001, 0xffff_fffe, 0xffff_ffff];

fn numbers() -> Vec<Input> {
    // Include small values, so that valid fields and shift counts occur.
    inputs(&EDGES, true, 600, |random| (random.next() >> 32) >> (random.next() % 32))
}

fn signed(value: u64) -> i128 {
    i128::from((value as u32).cast_signed())
}

fn unsigned(value: u64) -> i128 {
    i128::from(value as u32)
}

fn low(output: Output) -> u32 {
    output.low
}

/// Compares R12 with `expected`.
#[track_caller]
fn agrees(code: &str, expected: impl Fn(i128, i128, i128) -> i128, as_number: fn(u64) -> i128) {
    check(code, &numbers(), low, |[a, b, c]| expected(as_number(a), as_number(b), as_number(c)) as u32);
}

#[test]
fn sums_and_products() {
    agrees("IADD R12, R4, R6", |a, b, _| a + b, unsigned);
    agrees("IADD R12, R4, -R6", |a, b, _| a - b, unsigned);
    agrees("IADD R12, -R4, R6", |a, b, _| b - a, unsigned);
    agrees("IADD.SAT R12, R4, R6", |a, b, _| (a + b).clamp(-(1 << 31), (1 << 31) - 1), signed);
    agrees("IADD.SAT R12, R4, -R6", |a, b, _| (a - b).clamp(-(1 << 31), (1 << 31) - 1), signed);
    agrees("IADD32I R12, R4, 0x89abcdef", |a, _, _| a + 0x89ab_cdef, unsigned);
    agrees("IMUL R12, R4, R6", |a, b, _| a * b, unsigned);
    agrees("IMUL.HI R12, R4, R6", |a, b, _| (a * b) >> 32, signed);
    agrees("IMUL.U32.U32.HI R12, R4, R6", |a, b, _| (a * b) >> 32, unsigned);
    agrees("IMAD R12, R4, R6, R8", |a, b, c| a * b + c, signed);
    agrees("IMAD R12, R4, R6, -R8", |a, b, c| a * b - c, signed);
    agrees("IMAD.HI R12, R4, R6, R8", |a, b, c| ((a * b) >> 32) + c, signed);
    agrees("IMAD.U32.U32.HI R12, R4, R6, R8", |a, b, c| ((a * b) >> 32) + c, unsigned);
    agrees("ISCADD R12, R4, R6, 0x5", |a, b, _| (a << 5) + b, unsigned);
    agrees("ISAD R12, R4, R6, R8", |a, b, c| (a - b).abs() + c, signed);
    agrees("ISAD.U32 R12, R4, R6, R8", |a, b, c| (a - b).abs() + c, unsigned);
    agrees("IMNMX R12, R4, R6, PT", |a, b, _| a.min(b), signed);
    agrees("IMNMX R12, R4, R6, !PT", |a, b, _| a.max(b), signed);
    agrees("IMNMX.U32 R12, R4, R6, PT", |a, b, _| a.min(b), unsigned);
    agrees("ICMP.GT R12, R4, R6, R8", |a, b, c| if c > 0 { a } else { b }, signed);
    agrees("ICMP.LE.U32 R12, R4, R6, R8", |a, b, c| if c == 0 { a } else { b }, unsigned);
}

#[test]
fn condition_code_of_sums() {
    let flags = |sum: i128, carries: bool| {
        let value = sum as u32;
        let overflow = i128::from(value.cast_signed()) != sum;
        u32::from(value == 0) << 4 | (value >> 31) << 5 | u32::from(carries) << 6 | u32::from(overflow) << 7
    };
    check(
        "IADD R12.CC, R4, R6",
        &numbers(),
        |output| output.bits & 0xf0,
        |[a, b, _]| flags(signed(a) + signed(b), unsigned(a) + unsigned(b) >= 1 << 32),
    );
    // A subtraction sets the carry if it does not borrow.
    check(
        "IADD R12.CC, R4, -R6",
        &numbers(),
        |output| output.bits & 0xf0,
        |[a, b, _]| flags(signed(a) - signed(b), unsigned(a) >= unsigned(b)),
    );
}

#[test]
fn condition_code_of_difference_matches_comparison() {
    /// Name of a comparison, its predicate, and the conversion from words to numbers.
    type Case = (&'static str, fn(i128, i128) -> bool, fn(u64) -> i128);
    let tests: [Case; 10] = [
        ("LT", |a, b| a < b, signed),
        ("EQ", |a, b| a == b, signed),
        ("LE", |a, b| a <= b, signed),
        ("GT", |a, b| a > b, signed),
        ("NE", |a, b| a != b, signed),
        ("GE", |a, b| a >= b, signed),
        ("LO", |a, b| a < b, unsigned),
        ("LS", |a, b| a <= b, unsigned),
        ("HI", |a, b| a > b, unsigned),
        ("HS", |a, b| a >= b, unsigned),
    ];
    for (name, holds, number) in tests {
        let code = format!("IADD RZ.CC, R4, -R6\nCSETP.{name}.AND P0, P1, CC");
        check(&code, &numbers(), |o| o.bits & 3, |[a, b, _]| if holds(number(a), number(b)) { 1 } else { 2 });
    }
}

#[test]
fn numbers_of_64_bits_by_carry() {
    let wide = inputs(&[0, 1, 0xffff_ffff, 1 << 32, 1 << 63, u64::MAX, 0xffff_ffff_0000_0000], false, 400, |random| {
        random.next() >> (random.next() % 64)
    });
    check("IADD R12.CC, R4, R6\nIADD.X R13, R5, R7", &wide, Output::wide, |[a, b, _]| a.wrapping_add(b));
    check("IADD R12.CC, R4, -R6\nIADD.X R13, R5, -R7", &wide, Output::wide, |[a, b, _]| a.wrapping_sub(b));
    let compare = |condition: &str| format!("IADD RZ.CC, R4, -R6\nISETP.{condition}.X.AND P0, P1, R5, R7");
    let bits = |holds: bool| if holds { 1 } else { 2 };
    check(&compare("LT"), &wide, |o| o.bits & 3, |[a, b, _]| bits(a.cast_signed() < b.cast_signed()));
    check(&compare("LT.U32"), &wide, |o| o.bits & 3, |[a, b, _]| bits(a < b));
    check(&compare("EQ"), &wide, |o| o.bits & 3, |[a, b, _]| bits(a == b));
    check(&compare("GE"), &wide, |o| o.bits & 3, |[a, b, _]| bits(a.cast_signed() >= b.cast_signed()));
    let product = "IMUL.U32.U32 R12, R4, R6\nIMUL.U32.U32.HI R13, R4, R6";
    check(product, &wide, Output::wide, |[a, b, _]| (a & 0xffff_ffff) * (b & 0xffff_ffff));
    let scaled = "IMAD.U32.U32 R12.CC, R4, R6, R8\nIMAD.U32.U32.HI.X R13, R4, R6, R9";
    check(scaled, &wide, Output::wide, |[a, b, c]| ((a & 0xffff_ffff) * (b & 0xffff_ffff)).wrapping_add(c));
}

#[test]
fn lesser_and_greater_of_numbers_of_three_words() {
    // Use values whose upper words are often equal.
    let wide = inputs(&[0, 1, 1 << 32, 1 << 63, u64::MAX, 0x8000_0000_8000_0000], true, 400, |random| {
        let bits = random.next();
        if bits & 1 != 0 { bits } else { bits & 0x8000_0001_8000_0001 }
    });
    // The lowest word of the first operand is the lower word of c, and that of the second operand is the upper word of
    // c.
    let code = |types: &str, select: &str| {
        format!(
            "IMNMX{types}.XHI RZ.CC, R5, R7, {select}
             IMNMX.U32.XMED R13.CC, R4, R6, {select}
             IMNMX.U32.XLO R12, R8, R9, {select}"
        )
    };
    let number = |upper: u64, low: u64| i128::from(upper) << 32 | i128::from(low as u32);
    let signed = |upper: u64, low: u64| i128::from(upper.cast_signed()) << 32 | i128::from(low as u32);
    for (types, number) in [(".U32", number as fn(u64, u64) -> i128), ("", signed)] {
        for (select, least) in [("PT", true), ("!PT", false)] {
            check(&code(types, select), &wide, Output::wide, |[a, b, c]| {
                let (a, b) = (number(a, c), number(b, c >> 32));
                (if least { a.min(b) } else { a.max(b) }) as u64
            });
        }
    }
}

#[test]
fn comparisons_and_predicates() {
    for (name, holds) in [
        ("LT", (|a, b| a < b) as fn(i128, i128) -> bool),
        ("EQ", |a, b| a == b),
        ("LE", |a, b| a <= b),
        ("GT", |a, b| a > b),
        ("NE", |a, b| a != b),
        ("GE", |a, b| a >= b),
    ] {
        check(
            &format!("ISETP.{name}.AND P0, P1, R4, R6"),
            &numbers(),
            |o| o.bits & 3,
            |[a, b, _]| {
                if holds(signed(a), signed(b)) { 1 } else { 2 }
            },
        );
        agrees(&format!("ISET.{name}.U32.AND R12, R4, R6"), |a, b, _| if holds(a, b) { -1 } else { 0 }, unsigned);
        agrees(&format!("ISET.BF.{name}.AND R12, R4, R6"), |a, b, _| if holds(a, b) { 0x3f80_0000 } else { 0 }, signed);
    }
    let combined = "ISETP.LT.AND P2, PT, R6, R8\nISETP.LT.XOR P0, P1, R4, R6, !P2";
    check(
        combined,
        &numbers(),
        |o| o.bits & 3,
        |[a, b, c]| {
            let (less, with) = (signed(a) < signed(b), signed(b) >= signed(c));
            u32::from(less != with) | u32::from(less == with) << 1
        },
    );
    let moved = "R2P PR, R4, 0x7\nPSETP.AND.OR P0, P1, P0, !P1, P2\nP2R R12, PR, R6, 0x6";
    check(moved, &numbers(), low, |[a, b, _]| {
        let (p0, p1, p2) = (a & 1 != 0, a & 2 != 0, a & 4 != 0);
        let q = !p0 || p1 || p2;
        (b as u32) & !6 | u32::from(q) << 1 | u32::from(p2) << 2
    });
    agrees("ISETP.LT.AND P0, PT, R4, R6\nSEL R12, R4, R8, P0", |a, b, c| if a < b { a } else { c }, signed);
}

#[test]
fn logic_shifts_and_fields() {
    agrees("LOP.AND R12, R4, ~R6", |a, b, _| a & !b, unsigned);
    agrees("LOP.OR R12, R4, R6", |a, b, _| a | b, unsigned);
    agrees("LOP.XOR R12, ~R4, R6", |a, b, _| !a ^ b, unsigned);
    agrees("LOP.PASS_B R12, R4, ~R6", |_, b, _| !b, unsigned);
    agrees("SHL R12, R4, R6", |a, b, _| if b < 32 { a << b } else { 0 }, unsigned);
    agrees("SHL.W R12, R4, R6", |a, b, _| a << (b % 32), unsigned);
    agrees("SHR.U32 R12, R4, R6", |a, b, _| if b < 32 { a >> b } else { 0 }, unsigned);
    check("SHR R12, R4, R6", &numbers(), low, |[a, b, _]| (signed(a) >> unsigned(b).min(31)) as u32);
    check("SHR.W R12, R4, R6", &numbers(), low, |[a, b, _]| (signed(a) >> (b % 32)) as u32);
    agrees("POPC R12, R4, ~R6", |a, b, _| i128::from((a & !b & 0xffff_ffff).count_ones()), unsigned);
    agrees(
        "FLO.U32 R12, R4",
        |a, _, _| if a == 0 { -1 } else { 31 - i128::from((a as u32).leading_zeros()) },
        unsigned,
    );
    agrees("FLO.U32.SH R12, R4", |a, _, _| if a == 0 { -1 } else { i128::from((a as u32).leading_zeros()) }, unsigned);
    let magnitude = |a: i128| if a < 0 { !a } else { a };
    agrees(
        "FLO R12, R4",
        |a, _, _| if magnitude(a) == 0 { -1 } else { 31 - i128::from((magnitude(a) as u32).leading_zeros()) },
        signed,
    );
}

/// Extracts a bit field one bit at a time, following its definition.
fn field(value: u32, position: u64, length: u64, is_signed: bool) -> u32 {
    let bit = |index: u64| value >> index & 1;
    let fill = if is_signed && length > 0 { bit((position + length - 1).min(31)) } else { 0 };
    (0..32).fold(0, |result, index| {
        let one = if index < length && position + index < 32 { bit(position + index) } else { fill };
        result | one << index
    })
}

#[test]
fn bit_fields_bit_by_bit() {
    let mut cases = Vec::new();
    for value in [0, 1, 0x8000_0000, 0xdead_beef, 0xffff_ffff] {
        for position in [0, 1, 7, 30, 31, 32, 33, 200] {
            for length in [0, 1, 5, 31, 32, 33, 255] {
                cases.push([value, length << 8 | position, 0x1234_5678]);
            }
        }
    }
    let parts = |b: u64| (b & 0xff, b >> 8 & 0xff);
    check("BFE.U32 R12, R4, R6", &cases, low, |[a, b, _]| field(a as u32, parts(b).0, parts(b).1, false));
    check("BFE R12, R4, R6", &cases, low, |[a, b, _]| field(a as u32, parts(b).0, parts(b).1, true));
    check("BFE.BREV.U32 R12, R4, R6", &cases, low, |[a, b, _]| {
        field((a as u32).reverse_bits(), parts(b).0, parts(b).1, false)
    });
    check("BFI R12, R4, R6, R8", &cases, low, |[a, b, c]| {
        let (position, length) = parts(b);
        (0..32).fold(c as u32, |result, index: u64| {
            let inside = index >= position && index - position < length;
            if inside { result & !(1 << index) | (a as u32 >> (index - position) & 1) << index } else { result }
        })
    });
}

#[test]
fn permutations() {
    let table: [(&str, [[usize; 4]; 4]); 6] = [
        ("F4E", [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]]),
        ("B4E", [[0, 7, 6, 5], [1, 0, 7, 6], [2, 1, 0, 7], [3, 2, 1, 0]]),
        ("RC8", [[0; 4], [1; 4], [2; 4], [3; 4]]),
        ("ECL", [[0, 1, 2, 3], [1, 1, 2, 3], [2, 2, 2, 3], [3; 4]]),
        ("ECR", [[0; 4], [0, 1, 1, 1], [0, 1, 2, 2], [0, 1, 2, 3]]),
        ("RC16", [[0, 1, 0, 1], [2, 3, 2, 3], [0, 1, 0, 1], [2, 3, 2, 3]]),
    ];
    let bytes = [0x80u8, 0x11, 0x92, 0x33, 0xc4, 0x55, 0xe6, 0x77];
    let (a, c) = (0x3392_1180, 0x77e6_55c4);
    for (mode, rows) in table {
        let cases: Vec<Input> = (0..4).map(|select| [a, select, c]).collect();
        check(&format!("PRMT.{mode} R12, R4, R6, R8"), &cases, low, |[_, select, _]| {
            u32::from_le_bytes(rows[select as usize].map(|index| bytes[index]))
        });
    }
    check("PRMT R12, R4, R6, R8", &[[a, 0x8f47, c], [a, 0x0123, c], [a, 0xf9a8, c]], low, |[_, select, _]| {
        u32::from_le_bytes(std::array::from_fn(|index| {
            let nibble = (select >> (4 * index) & 0xf) as usize;
            let byte = bytes[nibble & 7];
            if nibble < 8 { byte } else { (byte.cast_signed() >> 7).cast_unsigned() }
        }))
    });
}

#[test]
fn moves_of_some_lanes() {
    let outputs = compute("MOV R12, R4\nMOV R12, R6, 0x5", &[[1, 2, 0]; 40]);
    for (lane, output) in outputs.iter().enumerate() {
        assert_eq!(output.low, if lane % 2 == 0 { 2 } else { 1 }, "lane {lane}");
    }
}

#[test]
fn integer_conversions() {
    agrees("I2I.S32.S8.B1 R12, R4", |a, _, _| i128::from((a >> 8) as i8), unsigned);
    agrees("I2I.U32.U16.B2 R12, R4", |a, _, _| a >> 16, unsigned);
    agrees("I2I.S32.S32 R12, |R4|", |a, _, _| a.abs(), signed);
    agrees("I2I.U8.S32.SAT R12, R4", |a, _, _| a.clamp(0, 255), signed);
    agrees("I2I.S16.S32 R12, -R4", |a, _, _| i128::from((-a) as i16), signed);
}
