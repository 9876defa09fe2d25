//! What the fuzz targets share: getting past a checksum no fuzzer guesses.

/// Splits an input into its first byte, which steers the target, and the rest, grown with
/// zeros to at least `least` bytes: real structures end in zeros.
pub fn steer(data: &[u8], least: usize) -> Option<(u8, Vec<u8>)> {
    let (steer, rest) = data.split_first()?;
    let mut bytes = rest.to_vec();
    if bytes.len() < least {
        bytes.resize(least, 0);
    }
    Some((*steer, bytes))
}

/// Puts the right magic at the front and the right checksum at `at`, computed over the first
/// `used` bytes, so that what lies behind the checksum is reached.
pub fn seal(bytes: &mut [u8], magic: &[u8], at: usize, used: usize) {
    if used > bytes.len() || at + 4 > used || magic.len() > used {
        return;
    }
    bytes[..magic.len()].copy_from_slice(magic);
    bytes[at..at + 4].fill(0);
    let crc = hearth_io::checksum::crc32c(&bytes[..used]);
    bytes[at..at + 4].copy_from_slice(&crc.to_le_bytes());
}
