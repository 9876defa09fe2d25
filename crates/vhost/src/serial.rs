//! The serial number a guest finds.

/// Bytes of a virtio block device's serial number (virtio 1.2, 5.2.6, `VIRTIO_BLK_T_GET_ID`).
pub const SERIAL_LEN: usize = 20;

/// What the guest finds as serial number (`/dev/disk/by-id/virtio-…`): the disk's name, or as
/// much of a long one as leaves room for a checksum that tells it from others.
pub fn serial(name: &str) -> [u8; SERIAL_LEN] {
    let mut out = [0u8; SERIAL_LEN];
    let bytes = name.as_bytes();
    if bytes.len() <= SERIAL_LEN {
        out[..bytes.len()].copy_from_slice(bytes);
        return out;
    }
    let sum = format!("-{:08x}", hearth_io::checksum::crc32c(bytes));
    let mut head = SERIAL_LEN - sum.len();
    while !name.is_char_boundary(head) {
        head -= 1;
    }
    out[..head].copy_from_slice(&bytes[..head]);
    out[head..head + sum.len()].copy_from_slice(sum.as_bytes());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_stay_different() {
        assert_eq!(&serial("vm1")[..4], b"vm1\0");
        assert_eq!(&serial("exactly-twenty-bytes"), b"exactly-twenty-bytes");
        let a = serial("customer-database-primary-0");
        let b = serial("customer-database-primary-1");
        assert_ne!(a, b);
        assert!(a.starts_with(b"customer-da"));
        assert!(a.iter().all(|c| *c != 0));
        // A name is cut between characters.
        assert!(std::str::from_utf8(&serial("ääääääääääää")[..19]).is_ok());
    }
}
