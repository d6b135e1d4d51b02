//! Tests of the assembler's language beyond single instructions.

use crate::{Kernel, Program, assemble, decode};

fn program(source: &str) -> Program {
    assemble(source).unwrap_or_else(|errors| panic!("{errors:?}"))
}

/// Returns the instructions, which are 8 bytes each, as text.
fn listing(program: &Program) -> Vec<String> {
    let pairs = program.words.chunks(2).map(|pair| u64::from(pair[1]) << 32 | u64::from(pair[0]));
    pairs.map(|word| decode(word).unwrap().to_string()).collect()
}

/// Returns errors as `line:column: message`.
fn errors(source: &str) -> Vec<String> {
    assemble(source).expect_err("errors").iter().map(ToString::to_string).collect()
}

#[track_caller]
fn fails(source: &str, at: &str, message: &str) {
    let found = errors(source);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].starts_with(&format!("{at}: ")) && found[0].contains(message), "{found:?}");
}

#[test]
fn labels_are_relative_to_the_next_instruction() {
    let program = program(
        "start: MOV R0, R1
         loop:
           ISETP.LT.AND P0, PT, R0, 0x10  // without PT
           @P0 BRA loop ; BRA done
           BRA 0x8
         done: EXIT",
    );
    let expected =
        ["MOV R0, R1", "ISETP.LT.AND P0, PT, R0, 0x10, PT", "@P0 BRA pc-0x10", "BRA pc+0x8", "BRA pc-0x20", "EXIT"];
    assert_eq!(listing(&program), expected);
}

#[test]
fn short_and_long_instructions_mix() {
    let program = program("BRA end\nMOV.E32 R0, R1\nMOV R2, R3\nend: EXIT.E32\n.align 8\nNOP");
    assert_eq!(program.words.len() * 4, 8 + 4 + 8 + 4 + 8);
    let word = u64::from(program.words[1]) << 32 | u64::from(program.words[0]);
    assert_eq!(decode(word).unwrap().to_string(), "BRA pc+0xc");
    assert_eq!(program.bytes().len(), program.words.len() * 4);
}

#[test]
fn padding_is_made_of_instructions() {
    let program = program("MOV.E32 R0, R1\n.align 32\nEXIT");
    assert_eq!(program.words.len(), 8 + 2);
    let nop = decode(u64::from(program.words[2]) << 32 | u64::from(program.words[1])).unwrap();
    assert_eq!(nop.to_string(), "NOP");
    assert_eq!(decode(program.words[7].into()).unwrap().to_string(), "NOP.E32");
}

#[test]
fn parameters_given_one_by_one_are_aligned_to_their_size() {
    let program = program(".kernel k\n.params 4, 8, 1, 12, 16\nEXIT");
    let kernel = program.kernel("k").unwrap();
    let list: Vec<(u32, u32)> = kernel.parameters.iter().map(|one| (one.offset, one.bytes)).collect();
    assert_eq!(list, [(0, 4), (8, 8), (16, 1), (20, 12), (32, 16)]);
    assert_eq!(kernel.params, 48);
    let errors = crate::assemble(".kernel k\n.params 4000, 97\nEXIT").unwrap_err();
    assert!(errors[0].message.contains("at most 4096"), "{errors:?}");
}

#[test]
fn kernels() {
    let source = "
        .equ threads 256
        .equ param, 0x20
        helper: RET
        .kernel first
          .registers 20; .shared threads*4; .local 16; .barriers 2; .params 24
          .reg count R4
          .reg done P1
          loop:
          ISETP.EQ.AND done, PT, count, c[0x0][param + 4]
          @!done BRA loop
          CAL helper
          EXIT
        .kernel second
          .reg count R9
          loop: LD.E.64 count, [R2]
          BAR.SYNC 3
          BRA loop";
    let program = program(source);
    assert_eq!(program.kernels.len(), 2);
    let first = Kernel {
        name: "first".to_owned(),
        entry_offset: 8,
        size: 32,
        registers: 20,
        shared_bytes: 1024,
        local_bytes: 16,
        barriers: 2,
        params: 24,
        parameters: Vec::new(),
    };
    assert_eq!(program.kernel("first"), Some(&first));
    let second = program.kernel("second").unwrap();
    assert_eq!((second.entry_offset, second.size), (40, 24));
    // The register count includes R9 and R10, which are used by the load. The barrier count includes barriers 0 to 3,
    // because barrier 3 is used.
    assert_eq!((second.registers, second.barriers), (11, 4));
    let expected = [
        "RET",
        "ISETP.EQ.AND P1, PT, R4, c[0x0][0x24], PT",
        "@!P1 BRA pc-0x10",
        "CAL pc-0x20",
        "EXIT",
        "LD.E.64 R9, [R2]",
        "BAR.SYNC 0x3",
        "BRA pc-0x18",
    ];
    assert_eq!(listing(&program), expected);
    assert_eq!(program.kernel("third"), None);
}

#[test]
fn data() {
    let program = program(".word 1, -1, 0xffffffff\n.quad 0x1122334455667788, end\nend:");
    assert_eq!(program.words, [1, u32::MAX, u32::MAX, 0x5566_7788, 0x1122_3344, 28, 0]);
}

#[test]
fn listings_of_other_disassemblers_can_be_read() {
    let source = "
        /*0000*/  MOV R1, c [0x1] [0x100];        /* 0x2800440400005de4 */
        /*0008*/  isetp.ge.and P0, pt, R8, c [0x0] [0x30], pt;
        /*0010*/  S2R R8, SR_Tid_X;
        /*0018*/  @P0 BRA 0x8;
        /*0020*/  FADD R0, R1, -1;";
    let expected = [
        "MOV R1, c[0x1][0x100]",
        "ISETP.GE.AND P0, PT, R8, c[0x0][0x30], PT",
        "S2R R8, SR_TID.X",
        "@P0 BRA pc-0x18",
        "FADD R0, R1, -1.0",
    ];
    assert_eq!(listing(&program(source)), expected);
}

#[test]
fn floats() {
    let source = "
        FADD R0, R1, 0x3f800000
        FADD32I R0, R1, 3.14159
        FMUL R0, -R1, -2.5e-1
        DADD R0, R2, 0.5
        FSETP.LT.AND P0, PT, |R1|, -|R2|
        FADD32I R0, R1, 0x7f800000";
    let expected = [
        "FADD R0, R1, 1.0",
        "FADD32I R0, R1, 3.14159",
        "FMUL R0, -R1, -0.25",
        "DADD R0, R2, 0.5",
        "FSETP.LT.AND P0, PT, |R1|, -|R2|, PT",
        "FADD32I R0, R1, 0x7f800000",
    ];
    assert_eq!(listing(&program(source)), expected);
}

#[test]
fn expressions() {
    let source = ".equ a 3\n.equ b a*(2+0b10)-0x1\nMOV R0, -b\nLDS R1, [R2 - a*4 + 2]\nLDC R1, c[1][R2+b]";
    assert_eq!(listing(&program(source)), ["MOV R0, -0xb", "LDS R1, [R2-0xa]", "LDC R1, c[0x1][R2+0xb]"]);
}

#[test]
fn errors_name_their_place() {
    fails("NOP\n  FROB R1", "2:3", "no instruction `FROB`");
    fails("IADD.FTZ R0, R1, R2", "1:6", "`.FTZ` is not a suffix");
    fails("IADD R0, R1, R63", "1:14", "`R63` has no value");
    fails("IADD R0, R1", "1:12", "operand is missing");
    fails("IADD R0, R1, R2, R3", "1:16", "must end here");
    fails("IADD R0 R1, R2", "1:9", "`,` is needed");
    fails("IADD R0, R1, 0x80000", "1:1", "20 bits");
    fails("IADD32I R0, R1, R2", "1:1", "32-bit immediate");
    fails("IADD R0, -R1, -R2", "1:1", "only one");
    fails("IADD R0, --R1, R2", "1:10", "only one");
    fails("MOV R0.X, R1", "1:7", "only suffix");
    fails("MOV R0.CC, R1", "1:7", "condition code");
    fails("FADD R0, R1, 0.1", "1:1", "upper 20");
    fails("DADD R0, R2, 0.1", "1:14", "lower word");
    fails("ISETP.AND P0, PT, R0, R1", "1:1", "needs one of");
    fails("LD.E.7 R0, [R2]", "1:6", "`.7`");
    fails("LDS.E R0, [R2]", "1:1", "64-bit address");
    fails("LDS R0, [R2+0x1000000]", "1:1", "displacement");
    fails("LD R0, [R2*4]", "1:11", "`]`, `+` or `-`");
    fails("MOV R0, c[32][0]", "1:11", "constant bank");
    fails("MOV R0, c[0][2]", "1:1", "multiple of 4");
    fails("BRA nowhere", "1:5", "no value");
    fails("BRA CC.ZZ, 0", "1:5", "no test");
    fails("@P7 NOP", "1:2", "predicate");
    fails("@P0 SSY 0x10", "1:1", "no guard");
    fails("EXIT.S", "1:1", "cannot join");
    fails("FADD.E32.SAT R0, R1, R2", "1:1", "modifier");
    fails("S2R R0, SR_NOTHING", "1:9", "special register");
    fails("BAR R0", "1:1", "BAR.SYNC");
    fails("MOV R0, 0x100000000", "1:9", "32 bits");
    fails("x: NOP\nx: NOP", "2:1", "already exists");
    fails("R1: NOP", "1:1", "cannot be a label");
    fails(".equ P1 4", "1:6", "cannot be redefined");
    fails(".equ k 4\n.equ k 5", "2:6", "already exists");
    fails(".reg x 5", "1:8", "not a register");
    fails(".kernel a\n.kernel a", "2:9", "already exists");
    fails(".shared 4", "1:1", "belongs to a kernel");
    fails(".kernel a\n.shared 49153", "2:9", "0 to 49152");
    fails(".kernel a\n.registers 3\nMOV R3, R0", "3:1", "declares 3 registers, but this needs 4");
    fails(".kernel a\n.barriers 1\nBAR.SYNC 1", "3:1", "declares 1 barriers");
    fails(".align 24", "1:8", "power of two");
    fails(".frob 1", "1:1", "no directive .frob");
    fails(".word 0x1_0000_0000", "1:7", "32 bits");
    fails("/* begins\nand does not end", "1:1", "does not end");
    fails("MOV R0, R1 \u{3bb}", "1:12", "not part of the language");
    fails("// \u{3bb} may stand here\nMOV R0, ?", "2:9", "number is needed");
    fails(&format!(".equ x {}1{}", "(".repeat(40), ")".repeat(40)), "1:24", "parentheses");
    fails(".equ x 0x7fffffffffffffff + 1", "1:27", "too large");
}

#[test]
fn all_errors_are_reported_up_to_a_hundred() {
    assert_eq!(errors("FROB\nNOP\nMOV R0\n.frob\n").len(), 3);
    assert_eq!(errors(&"FROB\n".repeat(1000)).len(), 100);
    let both = errors("FROB\n.frob\nFROB");
    assert!(both[0].starts_with("1:") && both[1].starts_with("2:") && both[2].starts_with("3:"), "{both:?}");
}

#[test]
fn a_program_has_a_greatest_length() {
    let many = format!(".quad {}0", "0,".repeat(4095));
    let source = format!("{many}\n").repeat(256);
    assert_eq!(program(&source).words.len(), 2 << 20);
    assert!(errors(&format!("{source}NOP"))[0].contains("longer than 8 MiB"));
}

#[test]
fn nothing_is_a_program() {
    assert_eq!(program(""), Program::default());
    assert_eq!(program(" # nothing\n\n/* at\nall */ ;;\n"), Program::default());
}

#[test]
fn the_documentation_has_a_program() {
    let page = include_str!("../../../docs/reference/sm20-assembly.md");
    let source = page.split("```").nth(1).unwrap();
    let program = program(source);
    let kernel = program.kernel("saxpy").unwrap();
    assert_eq!((kernel.registers, kernel.params, kernel.size), (8, 24, 16 * 8));
    assert_eq!(listing(&program)[13], "FFMA R6, R1, c[0x0][0x24], R6");
}
