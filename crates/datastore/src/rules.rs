//! Which files become disks.
//!
//! A virtual machine's directory holds a few large files and many small ones: descriptions, locks, logs. Only
//! the large ones are worth a disk of their own. A file whose name says that it will be large is one from its first
//! block on.

/// Bytes from which on a file is large.
const LARGE: u64 = 1 << 20;
/// What names of images end with.
const ENDS: &[&str] = &[".vmdk", ".qcow2", ".raw", ".img", ".vhdx", ".vhd"];
/// What a host writes beside its disks and is small: never a disk, whatever it is called.
const LOCK: &[u8] = b".lck-";

/// See the module.
#[derive(Clone, Debug)]
pub struct Rules {
    large: u64,
    ends: Vec<Vec<u8>>,
}

impl Default for Rules {
    fn default() -> Rules {
        Rules {
            large: LARGE,
            ends: ENDS.iter().map(|end| end.as_bytes().to_vec()).collect(),
        }
    }
}

impl Rules {
    /// A file of this name becomes a disk however short it is.
    pub fn name_fits(&self, name: &[u8]) -> bool {
        let lower = name.to_ascii_lowercase();
        !lower.starts_with(LOCK) && self.ends.iter().any(|end| lower.ends_with(end))
    }

    /// A file of this length becomes a disk whatever it is called.
    pub fn size_fits(&self, size: u64) -> bool {
        size > self.large
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_disks_and_what_lies_beside_them_is_not() {
        let rules = Rules::default();
        for name in [
            "vm-flat.vmdk",
            "vm-000001-delta.vmdk",
            "A.QCOW2",
            "x.raw",
            "x.img",
            "x.vhdx",
            "x.vhd",
        ] {
            assert!(rules.name_fits(name.as_bytes()), "{name}");
        }
        for name in [
            "vm.vmx",
            "vmware.log",
            ".lck-0100.vmdk",
            "vmdk",
            "x.img.bak",
        ] {
            assert!(!rules.name_fits(name.as_bytes()), "{name}");
        }
        assert!(!rules.size_fits(1 << 20) && rules.size_fits((1 << 20) + 1));
    }
}
