// SPDX-License-Identifier: Apache-2.0
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;
