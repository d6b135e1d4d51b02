//! Tests cubins: valid ones in the layout of NVIDIA's compilers, corrupt ones, and ones for other architectures.

use object::elf::{ELFCLASS64, EM_CUDA, SHF_ALLOC, SHF_EXECINSTR, SHT_NOBITS, SHT_PROGBITS, SHT_REL};
use object::write::elf::{FileHeader, SectionHeader, Writer};
use proptest::prelude::*;

use crate::{assemble, cubin};

struct Section {
    name: &'static str,
    kind: u32,
    info: u32,
    flags: u64,
    data: Vec<u8>,
    /// Size of a section without data, in bytes.
    size: u64,
}

impl Section {
    fn new(name: &'static str, data: &[u8]) -> Self {
        Self { name, kind: SHT_PROGBITS, info: 0, flags: SHF_ALLOC.into(), data: data.to_vec(), size: 0 }
    }

    fn empty(name: &'static str, size: u64) -> Self {
        Self { kind: SHT_NOBITS, size, ..Self::new(name, &[]) }
    }
}

fn elf(machine: u16, flags: u32, sections: &[Section]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut writer = Writer::new(object::Endianness::Little, true, &mut bytes);
    writer.reserve_file_header();
    let mut placed = Vec::new();
    for section in sections {
        let name = writer.add_section_name(section.name.as_bytes());
        let index = writer.reserve_section_index();
        let offset = writer.reserve(section.data.len(), 8);
        placed.push((name, index, offset));
    }
    writer.reserve_shstrtab_section_index();
    writer.reserve_shstrtab();
    writer.reserve_section_headers();
    let header = FileHeader { os_abi: 0x33, abi_version: 7, e_type: 2, e_machine: machine, e_entry: 0, e_flags: flags };
    writer.write_file_header(&header).expect("a header");
    for section in sections {
        writer.write_align(8);
        writer.write(&section.data);
    }
    writer.write_shstrtab();
    writer.write_null_section_header();
    for (section, (name, _, offset)) in sections.iter().zip(&placed) {
        let size = if section.kind == SHT_NOBITS { section.size } else { section.data.len() as u64 };
        writer.write_section_header(&SectionHeader {
            name: Some(*name),
            sh_type: section.kind,
            sh_flags: section.flags,
            sh_addr: 0,
            sh_offset: *offset as u64,
            sh_size: size,
            sh_link: 0,
            sh_info: section.info,
            sh_addralign: 8,
            sh_entsize: 0,
        });
    }
    writer.write_shstrtab_section_header();
    bytes
}

const SOURCE: &str = ".kernel add\n.params 12\nMOV R0, c[0][0x20]\nMOV R1, c[0][0x24]\nEXIT";

fn sections() -> Vec<Section> {
    let code = assemble(SOURCE).expect("a program").bytes();
    let text = Section {
        info: 10 << 24 | 3,
        flags: u64::from(SHF_ALLOC | SHF_EXECINSTR) | 2 << 20,
        ..Section::new(".text.add", &code)
    };
    let info = [
        // Write a maximum number of registers, and then the parameters: symbol, offset and size.
        vec![0x03, 0x1b, 63, 0],
        vec![0x04, 0x0a, 8, 0, 5, 0, 0, 0, 0x20, 0, 12, 0],
        vec![0x03, 0x19, 12, 0],
        // Write the second parameter before the first.
        vec![0x04, 0x17, 12, 0, 5, 0, 0, 0, 1, 0, 8, 0, 0, 0xf0, 0x11, 0],
        vec![0x04, 0x17, 12, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0xf0, 0x21, 0],
    ];
    vec![
        Section::new(".nv.info", &[]),
        text,
        Section::new(".nv.info.add", &info.concat()),
        Section::new(".nv.constant0.add", &[0; 44]),
        Section::empty(".nv.shared.add", 256),
        Section::empty(".nv.local.add", 16),
    ]
}

fn cubin_of(sections: &[Section]) -> Vec<u8> {
    elf(EM_CUDA, 0x14_0114, sections)
}

#[test]
fn cubin_gives_code_and_resources_of_its_kernels() {
    let program = cubin::read(&cubin_of(&sections())).expect("a cubin");
    assert_eq!(program.bytes(), assemble(SOURCE).expect("a program").bytes());
    let kernel = program.kernel("add").expect("the kernel");
    assert_eq!((kernel.registers, kernel.barriers, kernel.params), (10, 2, 12));
    let list: Vec<(u32, u32)> = kernel.parameters.iter().map(|one| (one.offset, one.bytes)).collect();
    assert_eq!(list, [(0, 8), (8, 4)]);
    assert_eq!((kernel.shared_bytes, kernel.local_bytes, kernel.entry_offset), (256, 16, 0));
    let mut two = sections();
    let code = assemble(SOURCE).expect("a program").bytes();
    two.push(Section { info: 4 << 24, ..Section::new(".text.second", &code) });
    let program = cubin::read(&cubin_of(&two)).expect("a cubin");
    assert_eq!(program.kernel("second").expect("the kernel").entry_offset as usize, code.len());
}

#[test]
fn cubins_that_need_more_are_refused_by_name() {
    let with = |section| {
        let mut sections = sections();
        sections.push(section);
        cubin::read(&cubin_of(&sections)).expect_err("refused")
    };
    assert!(with(Section::new(".nv.constant16.add", &[1; 8])).contains(".nv.constant16.add"));
    assert!(with(Section::empty(".nv.global", 64)).contains("global variables"));
    assert!(with(Section { kind: SHT_REL, ..Section::new(".rel.text.add", &[0; 16]) }).contains("relocations"));
    let error = cubin::read(&elf(EM_CUDA, 0x46_0546, &sections())).expect_err("another architecture");
    assert!(error.contains("sm_70"), "{error}");
    let error = cubin::read(&elf(62, 0, &sections())).expect_err("another machine");
    assert!(error.contains("machine 62"), "{error}");
    assert!(cubin::read(&cubin_of(&[])).expect_err("nothing").contains("no kernel"));
    assert!(cubin::read(b"\x7fELF").is_err() && cubin::read(b"").is_err());
    assert_eq!(cubin_of(&[])[4], ELFCLASS64);
}

proptest! {
    #[test]
    fn damaged_cubins_are_refused_or_read(cut in 0usize..2000, changes in prop::collection::vec((0usize..2000, any::<u8>()), 0..6)) {
        let mut bytes = cubin_of(&sections());
        for (at, value) in changes {
            let length = bytes.len();
            bytes[at % length] = value;
        }
        bytes.truncate(bytes.len() - cut % bytes.len());
        let _ = cubin::read(&bytes);
    }
}
